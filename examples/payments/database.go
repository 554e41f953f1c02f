package main

import (
	"context"
	"database/sql"
	"fmt"
	"strconv"
	"strings"

	_ "github.com/jackc/pgx/v5/stdlib"

	"github.com/effectonce/idempotency/dedup/sqlstore"
	sqlitedb "github.com/effectonce/idempotency/drivers/sqlite"
)

// open opens a SQLite file, or PostgreSQL for a postgres:// URL, with the
// service's tables and the dedup table beside them.
func open(ctx context.Context, name string) (*sql.DB, *sqlstore.Store, sqlstore.Dialect, error) {
	dialect, id := sqlstore.SQLite, "INTEGER PRIMARY KEY AUTOINCREMENT"
	var db *sql.DB
	var err error
	if strings.HasPrefix(name, "postgres://") || strings.HasPrefix(name, "postgresql://") {
		dialect, id = sqlstore.Postgres, "bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY"
		db, err = sql.Open("pgx", name)
	} else {
		db, err = sqlitedb.Open(name)
	}
	if err != nil {
		return nil, nil, 0, err
	}
	store, err := sqlstore.New(db, dialect, sqlstore.Options{})
	if err == nil {
		err = store.Migrate(ctx)
	}
	for _, create := range []string{
		`CREATE TABLE IF NOT EXISTS accounts (name TEXT PRIMARY KEY, secret TEXT NOT NULL UNIQUE, limit_left BIGINT NOT NULL)`,
		`CREATE TABLE IF NOT EXISTS charges (id ` + id + `, account TEXT NOT NULL, cents BIGINT NOT NULL, description TEXT NOT NULL)`,
	} {
		if err == nil {
			_, err = db.ExecContext(ctx, create)
		}
	}
	if err != nil {
		db.Close()
		return nil, nil, 0, fmt.Errorf("open %s: %w", dialect, err)
	}
	return db, store, dialect, nil
}

// sql writes a query's question marks as the database wants them.
func (a *api) sql(query string) string {
	if a.dialect != sqlstore.Postgres {
		return query
	}
	var b strings.Builder
	n := 0
	for _, r := range query {
		if r == '?' {
			n++
			b.WriteString("$" + strconv.Itoa(n))
		} else {
			b.WriteRune(r)
		}
	}
	return b.String()
}

// addAccount makes an account, or leaves it as it is.
func (a *api) addAccount(ctx context.Context, name, secret string, limit int64) error {
	_, err := a.db.ExecContext(ctx, a.sql(`INSERT INTO accounts (name, secret, limit_left) VALUES (?, ?, ?) ON CONFLICT (name) DO NOTHING`),
		name, secret, limit)
	return err
}
