// Package pgxstore keeps the dedup table in PostgreSQL (12 or later) over pgx.
//
//	store, err := pgxstore.New(pool, pgxstore.Options{})
//	err = store.Migrate(ctx)
//
// A [Store] works in both modes of package dedup. In transaction mode the work
// takes its transaction from the context:
//
//	tx := pgxstore.Tx(ctx)
//	_, err := tx.Exec(ctx, "INSERT INTO charges ...")
//
// The table is that of dedup/sqlstore, and both stores, in any number of
// processes, may use one table at the same time. Beside that one, this store
//
//   - makes no round trip more than the work's own transaction: BEGIN goes out
//     together with the claim, and the completion together with COMMIT;
//   - sends what exceeds a number of statements at once in batches, several
//     calls in one commit; see [Options.Lanes];
//   - refuses the work's own COMMIT and ROLLBACK, so that the outcome is always
//     known.
//
// All leases and TTLs are reckoned by the database's clock, so the clocks of
// the application's machines don't matter. It works behind a pooler in
// transaction mode; set pgx's DefaultQueryExecMode to what the pooler supports.
//
// A transaction holds an advisory lock on a 64-bit hash of its key, by which
// others see at once that the key is taken. Two keys with the same hash can
// only be told "in progress" for each other's sake.
package pgxstore
