package pgxstore_test

import (
	"context"
	"errors"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/effectonce/idempotency/dedup"
	"github.com/effectonce/idempotency/dedup/storetest"
	pgxstore "github.com/effectonce/idempotency/drivers/pgx"
)

func TestTxStore(t *testing.T) {
	for _, su := range setups {
		if su.opts.Isolation == pgx.Serializable {
			continue // different keys may be told ErrSerialization: see TestSerializable
		}
		t.Run(su.name, func(t *testing.T) {
			pool := newPool(t, func(c *pgxpool.Config) {
				c.ConnConfig.DefaultQueryExecMode = su.mode
				c.MaxConns = 20
			})
			ts := &tables{pool: pool}
			effects := newEffects(t, pool)
			insert := func(ctx context.Context, name string) error {
				_, err := pgxstore.Tx(ctx).Exec(ctx, "INSERT INTO "+effects+" VALUES ($1)", name)
				return err
			}
			storetest.RunTx(t, func(t *testing.T) dedup.TxStore {
				s, name := newStore(t, pool, su.opts)
				ts.m.Store(s, name)
				return s
			}, storetest.TxCaps{
				Caps:   ts.caps(),
				Effect: insert,
				Effects: func(t *testing.T, _ dedup.TxStore) []string {
					rows, err := pool.Query(context.Background(), "SELECT name FROM "+effects)
					if err != nil {
						t.Fatal(err)
					}
					names, err := pgx.CollectRows(rows, pgx.RowTo[string])
					if err != nil {
						t.Fatal(err)
					}
					return names
				},
				Violate: func(ctx context.Context) error {
					name := dedup.NewToken().String()
					if err := insert(ctx, name); err != nil {
						return err
					}
					if insert(ctx, name) == nil {
						return errors.New("the second insert was not refused")
					}
					return nil
				},
				ViolationAborts: true,
				End: func(ctx context.Context) error {
					_, err := pgxstore.Tx(ctx).Exec(ctx, "COMMIT")
					return err
				},
			})
		})
	}
}
