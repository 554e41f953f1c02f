package pgxstore_test

import (
	"context"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/effectonce/idempotency/dedup"
	"github.com/effectonce/idempotency/dedup/storetest"
	pgxstore "github.com/effectonce/idempotency/drivers/pgx"
)

// setup is a way to configure the store, all of which keep the same promises.
type setup struct {
	name string
	mode pgx.QueryExecMode
	opts pgxstore.Options
}

var setups = []setup{
	{"CacheStatement", pgx.QueryExecModeCacheStatement, pgxstore.Options{}},
	{"CacheDescribe", pgx.QueryExecModeCacheDescribe, pgxstore.Options{}},
	{"DescribeExec", pgx.QueryExecModeDescribeExec, pgxstore.Options{}},
	{"Exec", pgx.QueryExecModeExec, pgxstore.Options{}},
	{"SimpleProtocol", pgx.QueryExecModeSimpleProtocol, pgxstore.Options{}},
	{"RepeatableRead", pgx.QueryExecModeCacheStatement, pgxstore.Options{Isolation: pgx.RepeatableRead}},
	{"Serializable", pgx.QueryExecModeCacheStatement, pgxstore.Options{Isolation: pgx.Serializable}},
	{"OneLane", pgx.QueryExecModeCacheStatement, pgxstore.Options{Lanes: 1}},
	{"OneLaneSimpleProtocol", pgx.QueryExecModeSimpleProtocol, pgxstore.Options{Lanes: 1, BatchRows: 3}},
}

// tables remembers which table a store is on.
type tables struct {
	pool *pgxpool.Pool
	m    sync.Map
}

func (ts *tables) caps() storetest.Caps {
	update := func(t *testing.T, s dedup.Store, k dedup.Key, set string) {
		t.Helper()
		name, _ := ts.m.Load(s)
		tag, err := ts.pool.Exec(context.Background(), "UPDATE "+name.(string)+" SET "+set+" WHERE scope = $1 AND id_key = $2", k.Scope, k.ID)
		if err != nil || tag.RowsAffected() != 1 {
			t.Fatalf("moving the times of %v: %v, %v", k, tag, err)
		}
	}
	return storetest.Caps{
		Lapse: func(t *testing.T, s dedup.Store, k dedup.Key) {
			update(t, s, k, "lease_until = clock_timestamp() - interval '1 minute'")
		},
		Expire: func(t *testing.T, s dedup.Store, k dedup.Key) {
			update(t, s, k, "expires_at = clock_timestamp() - interval '1 minute', lease_until = clock_timestamp() - interval '1 minute'")
		},
	}
}

func TestStore(t *testing.T) {
	for _, su := range setups {
		t.Run(su.name, func(t *testing.T) {
			pool := newPool(t, func(c *pgxpool.Config) { c.ConnConfig.DefaultQueryExecMode = su.mode })
			ts := &tables{pool: pool}
			storetest.Run(t, func(t *testing.T) dedup.Store {
				s, name := newStore(t, pool, su.opts)
				ts.m.Store(s, name)
				return s
			}, ts.caps())
		})
	}
}
