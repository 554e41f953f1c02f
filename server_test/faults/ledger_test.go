package faults

import (
	"context"
	"database/sql"
	"fmt"

	"github.com/redis/go-redis/v9"

	"github.com/effectonce/idempotency/dedup/sqlstore"
	pgxstore "github.com/effectonce/idempotency/drivers/pgx"
	"github.com/jackc/pgx/v5/pgxpool"
)

// ledger is where effects go. It has nothing by which it could refuse a second
// one, so that what it holds shows what the library let through.
type ledger interface {
	// add records one effect of op, in the context's transaction if there is
	// one, and returns its number.
	add(ctx context.Context, op string) (int64, error)

	// effects returns how many effects each operation has had.
	effects(ctx context.Context) (map[string]int, error)
}

// sqlLedger is a table over database/sql.
type sqlLedger struct {
	db        *sql.DB
	table     string
	returning bool // no LastInsertId
}

func (l *sqlLedger) add(ctx context.Context, op string) (int64, error) {
	var on interface {
		ExecContext(context.Context, string, ...any) (sql.Result, error)
		QueryRowContext(context.Context, string, ...any) *sql.Row
	} = l.db
	if tx := sqlstore.Tx(ctx); tx != nil {
		on = tx
	}
	if l.returning {
		var id int64
		err := on.QueryRowContext(ctx, `INSERT INTO `+l.table+` (op) VALUES ($1) RETURNING id`, op).Scan(&id)
		return id, err
	}
	res, err := on.ExecContext(ctx, `INSERT INTO `+l.table+` (op) VALUES (?)`, op)
	if err != nil {
		return 0, err
	}
	return res.LastInsertId()
}

func (l *sqlLedger) effects(ctx context.Context) (map[string]int, error) {
	rows, err := l.db.QueryContext(ctx, `SELECT op, count(*) FROM `+l.table+` GROUP BY op`)
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	all := map[string]int{}
	for rows.Next() {
		var op string
		var n int
		if err := rows.Scan(&op, &n); err != nil {
			return nil, err
		}
		all[op] = n
	}
	return all, rows.Err()
}

// pgxLedger is the same over native pgx.
type pgxLedger struct {
	pool  *pgxpool.Pool
	table string
}

func (l *pgxLedger) add(ctx context.Context, op string) (int64, error) {
	query := `INSERT INTO ` + l.table + ` (op) VALUES ($1) RETURNING id`
	var id int64
	if tx := pgxstore.Tx(ctx); tx != nil {
		return id, tx.QueryRow(ctx, query, op).Scan(&id)
	}
	err := l.pool.QueryRow(ctx, query, op).Scan(&id)
	return id, err
}

func (l *pgxLedger) effects(ctx context.Context) (map[string]int, error) {
	rows, err := l.pool.Query(ctx, `SELECT op, count(*) FROM `+l.table+` GROUP BY op`)
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	all := map[string]int{}
	for rows.Next() {
		var op string
		var n int
		if err := rows.Scan(&op, &n); err != nil {
			return nil, err
		}
		all[op] = n
	}
	return all, rows.Err()
}

// redisLedger is a list.
type redisLedger struct {
	client *redis.Client
	list   string
}

func (l *redisLedger) add(ctx context.Context, op string) (int64, error) {
	return l.client.RPush(ctx, l.list, op).Result()
}

func (l *redisLedger) effects(ctx context.Context) (map[string]int, error) {
	ops, err := l.client.LRange(ctx, l.list, 0, -1).Result()
	if err != nil {
		return nil, fmt.Errorf("effects: %w", err)
	}
	all := map[string]int{}
	for _, op := range ops {
		all[op]++
	}
	return all, nil
}
