package main

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"log/slog"
	"net/http"
	"strconv"
	"time"

	"github.com/effectonce/idempotency/dedup"
	"github.com/effectonce/idempotency/dedup/sqlstore"
	"github.com/effectonce/idempotency/server"
)

// api is a small payments service: accounts with a limit, and charges on them.
type api struct {
	db      *sql.DB
	dialect sqlstore.Dialect
	log     *slog.Logger
}

// routes puts the guard where the money moves. Authentication comes first: the
// guard's scope is the account that it found, so that one account's keys, and
// the answers behind them, are out of another's reach.
func (a *api) routes(store dedup.Store) http.Handler {
	guard := server.New(store, server.Options{
		Scope:    func(r *http.Request) (string, error) { return accountOf(r.Context()), nil },
		Mode:     dedup.Transaction,
		Required: true,            // an unkeyed charge is refused
		Wait:     2 * time.Second, // a quick second click gets the answer, not a 409
		TTL:      72 * time.Hour,  // longer than any client retries
		Logger:   a.log,
	})
	mux := http.NewServeMux()
	mux.Handle("POST /v1/charges", guard.Handler(http.HandlerFunc(a.charge)))
	mux.HandleFunc("GET /v1/charges/{id}", a.get) // reading needs no guard
	return a.authenticate(mux)
}

type accountKey struct{}

func accountOf(ctx context.Context) string {
	account, _ := ctx.Value(accountKey{}).(string)
	return account
}

// authenticate finds the account by its secret. The secret itself would be no
// scope: it is replaced now and then, and a retry may come with the new one.
func (a *api) authenticate(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, secret, _ := r.BasicAuth()
		var account string
		err := a.db.QueryRowContext(r.Context(), a.sql(`SELECT name FROM accounts WHERE secret = ?`), secret).Scan(&account)
		switch {
		case errors.Is(err, sql.ErrNoRows):
			w.Header().Set("WWW-Authenticate", "Basic")
			fail(w, http.StatusUnauthorized, "unknown account")
		case err != nil:
			fail(w, http.StatusServiceUnavailable, "try again later")
		default:
			next.ServeHTTP(w, r.WithContext(context.WithValue(r.Context(), accountKey{}, account)))
		}
	})
}

type chargeRequest struct {
	Cents       int64  `json:"cents"`
	Description string `json:"description"`
}

type chargeView struct {
	ID          int64  `json:"id"`
	Cents       int64  `json:"cents"`
	Description string `json:"description"`
	LimitLeft   int64  `json:"limit_left"`
}

// charge takes from the account's limit and records the charge. All of it is
// written in the guard's transaction, and commits together with the answer.
func (a *api) charge(w http.ResponseWriter, r *http.Request) {
	var req chargeRequest
	if err := json.NewDecoder(r.Body).Decode(&req); err != nil || req.Cents <= 0 {
		fail(w, http.StatusBadRequest, "want a positive number of cents")
		return
	}
	ctx, tx, account := r.Context(), sqlstore.Tx(r.Context()), accountOf(r.Context())

	res, err := tx.ExecContext(ctx, a.sql(`UPDATE accounts SET limit_left = limit_left - ? WHERE name = ? AND limit_left >= ?`),
		req.Cents, account, req.Cents)
	if err != nil {
		a.unavailable(w, err)
		return
	}
	if n, err := res.RowsAffected(); err != nil {
		a.unavailable(w, err)
		return
	} else if n == 0 {
		// A refusal is an answer: it is stored, and the retry gets it again
		// even if the limit has been raised meanwhile. For another try the
		// client takes another key.
		fail(w, http.StatusPaymentRequired, "over the limit")
		return
	}
	v := chargeView{Cents: req.Cents, Description: req.Description}
	err = tx.QueryRowContext(ctx, a.sql(`INSERT INTO charges (account, cents, description) VALUES (?, ?, ?) RETURNING id`),
		account, req.Cents, req.Description).Scan(&v.ID)
	if err == nil {
		err = tx.QueryRowContext(ctx, a.sql(`SELECT limit_left FROM accounts WHERE name = ?`), account).Scan(&v.LimitLeft)
	}
	if err != nil {
		a.unavailable(w, err)
		return
	}
	w.Header().Set("Location", "/v1/charges/"+strconv.FormatInt(v.ID, 10))
	reply(w, http.StatusCreated, v)
}

func (a *api) get(w http.ResponseWriter, r *http.Request) {
	v := chargeView{}
	id, err := strconv.ParseInt(r.PathValue("id"), 10, 64)
	if err == nil {
		err = a.db.QueryRowContext(r.Context(), a.sql(`SELECT c.id, c.cents, c.description, a.limit_left
			FROM charges c JOIN accounts a ON a.name = c.account WHERE c.id = ? AND c.account = ?`),
			id, accountOf(r.Context())).Scan(&v.ID, &v.Cents, &v.Description, &v.LimitLeft)
	}
	if err != nil {
		fail(w, http.StatusNotFound, "no such charge")
		return
	}
	reply(w, http.StatusOK, v)
}

// unavailable answers 503. In transaction mode a 5xx rolls back all that the
// handler wrote and frees the key, so the client's retry starts afresh.
func (a *api) unavailable(w http.ResponseWriter, err error) {
	a.log.Error("charge failed", "error", err)
	w.Header().Set("Retry-After", "1")
	fail(w, http.StatusServiceUnavailable, "try again later")
}

func reply(w http.ResponseWriter, status int, v any) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(v)
}

func fail(w http.ResponseWriter, status int, why string) {
	reply(w, status, map[string]string{"error": why})
}
