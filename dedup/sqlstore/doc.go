// Package sqlstore keeps the dedup table in a SQL database, over database/sql:
// PostgreSQL, MySQL or MariaDB, or SQLite. It imports no driver.
//
//	store, err := sqlstore.New(db, sqlstore.Postgres, sqlstore.Options{})
//	err = store.Migrate(ctx)
//
// A [Store] works in both modes of package dedup. In transaction mode the work
// finds its transaction in the context and must write through it, and must
// neither commit nor roll it back:
//
//	tx := sqlstore.Tx(ctx)
//	_, err := tx.ExecContext(ctx, "INSERT INTO charges ...")
//
// All leases and TTLs are reckoned by the database's clock, so the clocks of
// the application's machines don't matter.
//
// What the databases differ in, in transaction mode:
//
//   - PostgreSQL: a claim also takes a transaction-level advisory lock on a
//     64-bit hash of the key, by which duplicates see at once that the key is
//     taken. It works under pgbouncer's transaction pooling. Two keys with the
//     same hash can only be told "in progress" for each other's sake.
//   - MySQL and MariaDB: the same by GET_LOCK, which Galera and Group
//     Replication don't share between nodes: send all writes to one node.
//     Statements that commit implicitly, such as CREATE TABLE, must not be used
//     by the work.
//   - SQLite: one transaction at a time, also for different keys. Others wait
//     for their turn for up to [Options.BusyTimeout] and are then told
//     [dedup.ErrBusy]. A duplicate in the same Store is told "in progress" at
//     once; one in another process has to wait like any writer.
package sqlstore
