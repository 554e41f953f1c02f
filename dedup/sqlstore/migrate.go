package sqlstore

import (
	"context"
	"fmt"
	"strings"
)

// Schema returns the SQL that makes the table, for a migration tool. [Migrate]
// runs the same.
func (s *Store) Schema() string { return s.q.schema }

// schemaFor puts t in the place of the default name.
func schemaFor(schema string, t table, mark string) string {
	const index = DefaultTable + "_expires"
	schema = strings.ReplaceAll(schema, index, "{index}")
	schema = strings.ReplaceAll(schema, DefaultTable, t.quoted(mark))
	return strings.ReplaceAll(schema, "{index}", mark+t.name+"_expires"+mark)
}

// Migrate makes the table if there is none. It may be called at every start of
// every node, also at the same time, and needs no right to create anything
// where the table is there already.
func (s *Store) Migrate(ctx context.Context) error {
	if s.tableExists(ctx) {
		return nil
	}
	var err error
	for range maxTries {
		if err = s.migrate(ctx); err == nil || ctx.Err() != nil {
			break
		}
		// Another node was faster, or is about to be.
		if c := s.classify(err); c != Serialization && c != Busy && c != Conflict {
			break
		}
		if s.tableExists(ctx) {
			return nil
		}
	}
	if err != nil {
		return s.wrap("migrate", err)
	}
	return nil
}

func (s *Store) tableExists(ctx context.Context) bool {
	var exists bool
	err := s.db.QueryRowContext(ctx, s.q.exists).Scan(&exists)
	return err == nil && exists
}

// migrate runs the schema in a transaction, so that the table is not to be seen
// without its index. (MySQL commits each statement, and needs but one.)
func (s *Store) migrate(ctx context.Context) error {
	done, err := s.dialect.write(ctx, s)
	if err != nil {
		return err
	}
	defer done()
	tx, err := s.db.BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	defer tx.Rollback() //nolint:errcheck // after Commit it does nothing
	if s.q.migrateLock != "" {
		if _, err := tx.ExecContext(ctx, s.q.migrateLock); err != nil {
			return err
		}
	}
	for _, st := range splitStatements(s.q.schema) {
		if _, err := tx.ExecContext(ctx, st); err != nil {
			return fmt.Errorf("%w in %q", err, st)
		}
	}
	return tx.Commit()
}

// splitStatements splits one of our own schemas, in which ";" ends nothing but
// statements.
func splitStatements(schema string) []string {
	var out []string
	for _, st := range strings.SplitAfter(schema, ";\n") {
		if strings.TrimSpace(st) != "" {
			out = append(out, strings.TrimSuffix(strings.TrimSpace(st), ";"))
		}
	}
	return out
}
