package suite

import (
	"cmp"
	"context"
	"database/sql"
	"net"
	"os"
	"path/filepath"
	"reflect"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/effectonce/idempotency/dedup"
	"github.com/effectonce/idempotency/dedup/sqlstore"
	mysqldb "github.com/effectonce/idempotency/drivers/mysql"
	redisstore "github.com/effectonce/idempotency/drivers/redis"
	sqlitedb "github.com/effectonce/idempotency/drivers/sqlite"
)

// Two nodes whose clocks are decades apart: one has the machine's, and the other
// is in a bubble of testing/synctest, where it is the year 2000. Neither takes
// over a lease of the other's that is live, nor respects one that has ended;
// neither replays what has expired. Only the store's clock counts.
func TestClockSkew(t *testing.T) {
	t.Parallel()
	table := "clock_" + dedup.NewToken().String()[:12]
	overSQL := func(open func() (*sql.DB, error), store func(*sql.DB, sqlstore.Options) (*sqlstore.Store, error)) func(*testing.T) (dedup.Store, func()) {
		return func(t *testing.T) (dedup.Store, func()) {
			db, err := open()
			if err != nil {
				t.Fatal(err)
			}
			s, err := store(db, sqlstore.Options{Table: table})
			if err == nil {
				err = s.Migrate(t.Context())
			}
			if err != nil {
				t.Fatal(err)
			}
			return s, func() { db.Close() }
		}
	}
	file := filepath.Join(t.TempDir(), "clock.db")
	postgres := func() (*sql.DB, error) { return sql.Open("pgx", postgresURL()) }
	mysql := func() (*sql.DB, error) {
		return mysqldb.Open(cmp.Or(os.Getenv("IDEMPOTENCY_MYSQL_DSN"), "root@tcp(127.0.0.1:3306)/test"))
	}
	drop := func(open func() (*sql.DB, error)) func() {
		return func() {
			if db, err := open(); err == nil {
				defer db.Close()
				if _, err := db.Exec("DROP TABLE IF EXISTS " + table); err != nil {
					t.Error(err)
				}
			}
		}
	}
	for _, s := range []struct {
		name string
		open func(*testing.T) (store dedup.Store, end func())
		drop func()
	}{
		{"sqlite", overSQL(func() (*sql.DB, error) { return sqlitedb.Open(file) }, sqlitedb.NewStore), func() {}},
		{"postgres", overSQL(postgres, func(db *sql.DB, o sqlstore.Options) (*sqlstore.Store, error) {
			return sqlstore.New(db, sqlstore.Postgres, o)
		}), drop(postgres)},
		{"mysql", overSQL(mysql, mysqldb.NewStore), drop(mysql)},
		{"redis", func(t *testing.T) (dedup.Store, func()) {
			// Without timeouts, which would be over by the other clock.
			client := redis.NewClient(&redis.Options{Addr: cmp.Or(os.Getenv("IDEMPOTENCY_REDIS_ADDR"), "127.0.0.1:6379"), ReadTimeout: -2, WriteTimeout: -2,
				Dialer: func(ctx context.Context, network, addr string) (net.Conn, error) {
					return new(net.Dialer).DialContext(ctx, network, addr)
				}})
			store, err := redisstore.New(t.Context(), client, redisstore.Options{Prefix: table + ":"})
			if err != nil {
				missing(t, "Redis (IDEMPOTENCY_REDIS_ADDR)", err)
			}
			return store, func() { client.Close() }
		}, func() {}},
	} {
		t.Run(s.name, func(t *testing.T) {
			defer s.drop()
			here, end := s.open(t)
			defer end()
			now := func(id string) dedup.Claim {
				return dedup.Claim{Key: dedup.Key{Scope: "s", ID: id}, Fingerprint: []byte("f"), Token: dedup.NewToken(), Lease: time.Hour, TTL: 2 * time.Hour}
			}
			want := func(t *testing.T, store dedup.Store, c dedup.Claim, state dedup.State) {
				t.Helper()
				res, err := store.Claim(t.Context(), c)
				if err != nil || res.State != state {
					t.Errorf("Claim of %s = %v, %v; want %v", c.Key.ID, res.State, err, state)
				}
				if left := res.Record.LeaseLeft; state == dedup.InProgress && (left < 59*time.Minute || left > time.Hour) {
					t.Errorf("the lease of %s lasts %v", c.Key.ID, left)
				}
			}
			end1 := func(t *testing.T, store dedup.Store, c dedup.Claim) { // its lease
				t.Helper()
				if err := store.Renew(t.Context(), c.Key, c.Token, 0); err != nil {
					t.Error(err)
				}
			}
			live, ended, theirs, theirEnded := now("live"), now("ended"), now("theirs"), now("their ended")
			want(t, here, live, dedup.Won)
			want(t, here, ended, dedup.Won)
			end1(t, here, ended)
			synctest.Test(t, func(t *testing.T) {
				if time.Now().Year() != 2000 {
					t.Fatalf("the other clock shows %v", time.Now())
				}
				there, end := s.open(t)
				defer end()
				want(t, there, now("live"), dedup.InProgress)
				want(t, there, now("ended"), dedup.Abandoned)
				want(t, there, theirs, dedup.Won)
				want(t, there, theirEnded, dedup.Won)
				end1(t, there, theirEnded)
			})
			want(t, here, now("theirs"), dedup.InProgress)
			want(t, here, now("their ended"), dedup.Abandoned)
		})
	}
}

// No call hands a store a point in time, so that there is none for it to mix with
// its own.
func TestStoresAreToldNoTime(t *testing.T) {
	t.Parallel()
	instant := reflect.TypeFor[time.Time]()
	var has func(typ reflect.Type) bool
	has = func(typ reflect.Type) bool {
		switch {
		case typ == instant:
			return true
		case typ.Kind() == reflect.Pointer || typ.Kind() == reflect.Slice:
			return has(typ.Elem())
		case typ.Kind() == reflect.Struct:
			for i := range typ.NumField() {
				if has(typ.Field(i).Type) {
					return true
				}
			}
		}
		return false
	}
	for _, typ := range []reflect.Type{reflect.TypeFor[dedup.Store](), reflect.TypeFor[dedup.TxStore](), reflect.TypeFor[dedup.Tx]()} {
		for m := range typ.NumMethod() {
			method := typ.Method(m)
			for i := range method.Type.NumIn() {
				if has(method.Type.In(i)) {
					t.Errorf("%v.%s is given a time", typ, method.Name)
				}
			}
		}
	}
}
