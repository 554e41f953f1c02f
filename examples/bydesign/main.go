// Bydesign has writes that need no key, since doing them twice does them once:
// a PUT to an id that the client has chosen, an update on condition of the
// version that was read, an id derived from what it is for, a value that is set
// and not added to, and a row that is made to be absent. Each is sent twice, and
// the state is shown after each.
//
//	go run ./examples/bydesign
package main

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"text/tabwriter"

	"github.com/effectonce/idempotency"
	sqlitedb "github.com/effectonce/idempotency/drivers/sqlite"
	"github.com/effectonce/idempotency/etag"
	"github.com/effectonce/idempotency/etag/sqlwrite"
)

func main() {
	if err := run(context.Background(), os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "bydesign:", err)
		os.Exit(1)
	}
}

type accounts struct{ db *sql.DB }

type account struct {
	Email   string `json:"email"`
	version int64
}

func (a *accounts) read(ctx context.Context, id string) (acc account, ok bool, err error) {
	err = a.db.QueryRowContext(ctx, `SELECT email, version FROM accounts WHERE id = ?`, id).Scan(&acc.Email, &acc.version)
	if errors.Is(err, sql.ErrNoRows) {
		return acc, false, nil
	}
	return acc, err == nil, err
}

// routes are the endpoints. Conditions are checked before the handler, for a
// quick refusal, and again in the statement that writes.
func (a *accounts) routes() http.Handler {
	lookup := func(r *http.Request) (etag.State, error) {
		acc, ok, err := a.read(r.Context(), r.PathValue("id"))
		return etag.State{Exists: ok, Tag: etag.FromVersion(acc.version)}, err
	}
	mux := http.NewServeMux()
	mux.HandleFunc("GET /accounts/{id}", a.get)
	mux.Handle("PUT /accounts/{id}", etag.Check(lookup, http.HandlerFunc(a.put)))
	mux.HandleFunc("DELETE /accounts/{id}", a.remove)
	return mux
}

func (a *accounts) get(w http.ResponseWriter, r *http.Request) {
	acc, ok, err := a.read(r.Context(), r.PathValue("id"))
	switch {
	case err != nil:
		http.Error(w, "no database", http.StatusInternalServerError)
	case !ok:
		http.NotFound(w, r)
	default:
		w.Header().Set("ETag", etag.FromVersion(acc.version).String())
		w.Header().Set("Content-Type", "application/json")
		_ = json.NewEncoder(w).Encode(acc)
	}
}

// put makes the account or sets its address. Where the client named a version,
// only that one is changed.
func (a *accounts) put(w http.ResponseWriter, r *http.Request) {
	var next account
	if err := json.NewDecoder(http.MaxBytesReader(w, r.Body, 1<<16)).Decode(&next); err != nil {
		http.Error(w, "the body must be an account", http.StatusBadRequest)
		return
	}
	ctx, id := r.Context(), r.PathValue("id")
	var err error
	if state, ok := etag.Checked(ctx); ok && state.Exists && r.Header.Get("If-Match") != "" {
		cur, _, rerr := a.read(ctx, id)
		if rerr == nil && etag.FromVersion(cur.version) != state.Tag {
			rerr = sqlwrite.ErrStale
		}
		if err = rerr; err == nil {
			err = sqlwrite.Versioned(ctx, a.db,
				sqlwrite.Q(`UPDATE accounts SET email = ?, version = version + 1 WHERE id = ? AND version = ?`, next.Email, id, cur.version),
				sqlwrite.Q(`SELECT version FROM accounts WHERE id = ?`, id))
		}
	} else {
		// Set, not added to: the same again changes nothing, not even the version.
		_, err = a.db.ExecContext(ctx, `INSERT INTO accounts (id, email, version) VALUES (?, ?, 1)
			ON CONFLICT (id) DO UPDATE SET email = excluded.email, version = version + 1 WHERE email <> excluded.email`, id, next.Email)
	}
	if p := etag.Failed(err); err != nil && p != nil {
		etag.WriteProblem(w, p)
		return
	}
	if err != nil {
		http.Error(w, "no database", http.StatusInternalServerError)
		return
	}
	a.get(w, r)
}

// remove makes the account absent. That it was so already is as good.
func (a *accounts) remove(w http.ResponseWriter, r *http.Request) {
	if _, err := a.db.ExecContext(r.Context(), `DELETE FROM accounts WHERE id = ?`, r.PathValue("id")); err != nil {
		http.Error(w, "no database", http.StatusInternalServerError)
		return
	}
	w.WriteHeader(http.StatusNoContent)
}

func run(ctx context.Context, out io.Writer) error {
	dir, err := os.MkdirTemp("", "bydesign")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	db, err := sqlitedb.Open(filepath.Join(dir, "accounts.db"))
	if err != nil {
		return err
	}
	defer db.Close()
	if _, err := db.ExecContext(ctx, `CREATE TABLE accounts (id TEXT PRIMARY KEY, email TEXT NOT NULL, version INTEGER NOT NULL)`); err != nil {
		return err
	}
	a := &accounts{db}
	srv := httptest.NewServer(a.routes())
	defer srv.Close()

	table := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	fmt.Fprintln(table, "request\tanswer\taccounts afterwards")
	send := func(what, method, id, ifMatch, body string) error {
		for range 2 {
			req, err := http.NewRequestWithContext(ctx, method, srv.URL+"/accounts/"+id, strings.NewReader(body))
			if err != nil {
				return err
			}
			if ifMatch != "" {
				req.Header.Set("If-Match", ifMatch)
			}
			resp, err := http.DefaultClient.Do(req)
			if err != nil {
				return err
			}
			resp.Body.Close()
			state, err := a.state(ctx)
			if err != nil {
				return err
			}
			fmt.Fprintf(table, "%s\t%d\t%s\n", what, resp.StatusCode, state)
		}
		return nil
	}
	// The id comes from what the account is for, so whoever makes it again, after
	// a crash for one, makes the same.
	derived := idempotency.Deterministic("accounts", "signup", "4711")[:8]
	for _, s := range []struct{ what, method, id, ifMatch, body string }{
		{"PUT to a chosen id", "PUT", "alice", "", `{"email":"a@example.com"}`},
		{"PUT to a derived id", "PUT", derived, "", `{"email":"d@example.com"}`},
		{"PUT sets, adds nothing", "PUT", "alice", "", `{"email":"b@example.com"}`},
		{"PUT if version 2", "PUT", "alice", etag.FromVersion(2).String(), `{"email":"c@example.com"}`},
		{"PUT by who saw version 1", "PUT", "alice", etag.FromVersion(1).String(), `{"email":"stale@example.com"}`},
		{"DELETE", "DELETE", "alice", "", ""},
	} {
		if err := send(s.what, s.method, s.id, s.ifMatch, s.body); err != nil {
			return err
		}
	}
	return table.Flush()
}

// state is all accounts, in a line.
func (a *accounts) state(ctx context.Context) (string, error) {
	rows, err := a.db.QueryContext(ctx, `SELECT id, email, version FROM accounts ORDER BY id`)
	if err != nil {
		return "", err
	}
	defer rows.Close()
	var all []string
	for rows.Next() {
		var id, email string
		var version int64
		if err := rows.Scan(&id, &email, &version); err != nil {
			return "", err
		}
		all = append(all, fmt.Sprintf("%s %s v%d", id, email, version))
	}
	return strings.Join(all, ", "), rows.Err()
}
