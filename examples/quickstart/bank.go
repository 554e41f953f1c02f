package main

import (
	"context"
	"database/sql"
	"encoding/json"
	"fmt"
	"net/http"

	"github.com/effectonce/idempotency/dedup"
	"github.com/effectonce/idempotency/dedup/sqlstore"
	sqlitedb "github.com/effectonce/idempotency/drivers/sqlite"
	"github.com/effectonce/idempotency/server"
)

// bank is the server side: a ledger of charges, and the dedup table beside it
// in the same SQLite file.
type bank struct {
	db *sql.DB
}

func openBank(ctx context.Context, file string) (*bank, *sqlstore.Store, error) {
	db, err := sqlitedb.Open(file)
	if err != nil {
		return nil, nil, err
	}
	store, err := sqlstore.New(db, sqlstore.SQLite, sqlstore.Options{Classify: sqlitedb.Classify})
	if err == nil {
		err = store.Migrate(ctx)
	}
	if err == nil {
		// Nothing here forbids two charges for one order: what keeps them
		// apart is the guard.
		_, err = db.ExecContext(ctx, `CREATE TABLE IF NOT EXISTS charges (
			id INTEGER PRIMARY KEY AUTOINCREMENT, order_id TEXT NOT NULL, cents INTEGER NOT NULL)`)
	}
	if err != nil {
		db.Close()
		return nil, nil, fmt.Errorf("open %s: %w", file, err)
	}
	return &bank{db}, store, nil
}

// routes guards POST /charges. Requests without a key run unguarded, as they
// would on any server.
func (b *bank) routes(store dedup.Store) http.Handler {
	guard := server.New(store, server.Options{
		Scope: server.SingleTenant,
		Mode:  dedup.Transaction,
	})
	mux := http.NewServeMux()
	mux.Handle("POST /charges", guard.Handler(http.HandlerFunc(b.charge)))
	return mux
}

type charge struct {
	Order string `json:"order"`
	Cents int    `json:"cents"`
}

type receipt struct {
	Charge int64  `json:"charge"`
	Order  string `json:"order"`
	Cents  int    `json:"cents"`
}

func (b *bank) charge(w http.ResponseWriter, r *http.Request) {
	var c charge
	if err := json.NewDecoder(r.Body).Decode(&c); err != nil {
		http.Error(w, "not a charge: "+err.Error(), http.StatusBadRequest)
		return
	}
	// In a guarded request the charge is written in the guard's transaction:
	// it commits with the stored answer or not at all.
	const insert = `INSERT INTO charges (order_id, cents) VALUES (?, ?)`
	var res sql.Result
	var err error
	if tx := sqlstore.Tx(r.Context()); tx != nil {
		res, err = tx.ExecContext(r.Context(), insert, c.Order, c.Cents)
	} else {
		res, err = b.db.ExecContext(r.Context(), insert, c.Order, c.Cents)
	}
	var id int64
	if err == nil {
		id, err = res.LastInsertId()
	}
	if err != nil {
		http.Error(w, "the ledger is not available", http.StatusInternalServerError)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(http.StatusCreated)
	_ = json.NewEncoder(w).Encode(receipt{id, c.Order, c.Cents})
}

// effects returns how often each order that starts with prefix was charged.
func (b *bank) effects(ctx context.Context, prefix string) (map[string]int, error) {
	rows, err := b.db.QueryContext(ctx,
		`SELECT order_id, count(*) FROM charges WHERE substr(order_id, 1, length(?)) = ? GROUP BY order_id`, prefix, prefix)
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	charged := map[string]int{}
	for rows.Next() {
		var order string
		var n int
		if err := rows.Scan(&order, &n); err != nil {
			return nil, err
		}
		charged[order] = n
	}
	return charged, rows.Err()
}
