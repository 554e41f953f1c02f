package pgxstore

import (
	"context"
	_ "embed"
	"strings"

	"github.com/jackc/pgx/v5"
)

//go:embed schema.sql
var schema string

// Schema returns the SQL that makes the table, for a migration tool.
// [Store.Migrate] runs the same.
func (s *Store) Schema() string {
	index := pgx.Identifier{s.table.name + "_expires"}.Sanitize()
	return strings.NewReplacer("{table}", s.table.quoted(), "{index}", index).Replace(schema)
}

// Migrate makes the table if there is none. It may be called at every start of
// every node, also at the same time, and needs no right to create anything
// where the table is there already.
func (s *Store) Migrate(ctx context.Context) error {
	for try := 1; ; try++ {
		var exists bool
		if err := s.pool.QueryRow(ctx, `SELECT to_regclass($1::text) IS NOT NULL`, s.table.quoted()).Scan(&exists); err != nil {
			return wrap("migrate", err)
		}
		if exists {
			return nil
		}
		err := pgx.BeginFunc(ctx, s.pool, func(tx pgx.Tx) error {
			if _, err := tx.Exec(ctx, s.sql.await, lockNumber("migrate", s.table.schema, s.table.name)); err != nil {
				return err
			}
			// One after the other: with arguments or without, every exec mode
			// takes a single statement.
			for st := range strings.SplitSeq(s.Schema(), ";\n") {
				if strings.TrimSpace(st) == "" {
					continue
				}
				if _, err := tx.Exec(ctx, st); err != nil {
					return err
				}
			}
			return nil
		})
		switch codeOf(err) {
		case codeUnique, codeDuplicateObject, codeDuplicateTable, codeSerialization, codeDeadlock:
			// Somebody makes the same table in another way at this moment.
			if try < maxTries {
				continue
			}
		}
		return wrap("migrate", err)
	}
}
