package consumer

import (
	"context"
	"encoding/hex"
	"strings"
)

// inline writes args into a statement as literals of bytes. The driver sends a
// statement with arguments in two round trips, one to prepare it, and one without
// in a single one.
func inline(query string, args ...string) string {
	for _, a := range args {
		query = strings.Replace(query, "?", "x'"+hex.EncodeToString([]byte(a))+"'", 1)
	}
	return query
}

// purgeMySQL first looks, without locks, and then deletes row by row, by the
// primary key. A DELETE of several rows may scan, as the server thinks best,
// and locks what it passes: it would wait for transactions that are marking
// events now, and they for it.
func (in *Inbox) purgeMySQL(ctx context.Context, limit int) (int, error) {
	st := in.Dialect.statements(in.table())
	type key struct{ group, id []byte }
	var keys []key
	rows, err := in.DB.QueryContext(ctx, st.old, orDefault(in.Retention, DefaultRetention).Microseconds(), limit)
	if err != nil {
		return 0, err
	}
	defer rows.Close()
	for rows.Next() {
		var k key
		if err := rows.Scan(&k.group, &k.id); err != nil {
			return 0, err
		}
		keys = append(keys, k)
	}
	if err := rows.Err(); err != nil || len(keys) == 0 {
		return 0, err
	}

	// One transaction, for one flush of the log. Two nodes that delete the same
	// rows do so in the same order, so they wait and don't dead-lock.
	tx, err := in.DB.BeginTx(ctx, nil)
	if err != nil {
		return 0, err
	}
	defer tx.Rollback()
	del, err := tx.PrepareContext(ctx, st.purge)
	if err != nil {
		return 0, err
	}
	defer del.Close()
	total := 0
	for _, k := range keys {
		res, err := del.ExecContext(ctx, k.group, k.id)
		if err != nil {
			return 0, err
		}
		n, err := res.RowsAffected()
		if err != nil {
			return 0, err
		}
		total += int(n)
	}
	return total, tx.Commit()
}
