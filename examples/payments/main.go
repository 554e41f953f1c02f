// Payments is a charge endpoint as one would put it into production: in
// transaction mode, so that the charge, the account's new limit and the stored
// answer commit together; behind authentication, with the account as the scope
// of its keys.
//
//	go run ./examples/payments                 # on a temporary SQLite file
//	go run ./examples/payments -db postgres://postgres@127.0.0.1:5432/test?sslmode=disable
//	go run ./examples/payments -listen 127.0.0.1:8080 -db payments.db
//
// Without -listen it plays a client that retries, reuses a key, goes over its
// limit, and is another tenant with the same key, and prints what is answered.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"time"

	"github.com/effectonce/idempotency/dedup"
)

func main() {
	db := flag.String("db", "", "SQLite file or postgres:// URL (default: a temporary file)")
	listen := flag.String("listen", "", "address to serve on until interrupted, instead of the demonstration")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if err := run(ctx, *db, *listen, os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "payments:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, name, listen string, out io.Writer) error {
	if name == "" {
		dir, err := os.MkdirTemp("", "payments")
		if err != nil {
			return err
		}
		defer os.RemoveAll(dir)
		name = filepath.Join(dir, "payments.db")
	}
	db, store, dialect, err := open(ctx, name)
	if err != nil {
		return err
	}
	defer db.Close()
	a := &api{db: db, dialect: dialect, log: slog.New(slog.NewTextHandler(os.Stderr, nil))}
	for _, account := range []string{"acme", "globex"} {
		if err := a.addAccount(ctx, account, account+"-secret", 1_000_000_00); err != nil {
			return err
		}
	}
	// Expired keys are removed for as long as the service runs.
	purging, stopPurging := context.WithCancel(ctx)
	defer stopPurging()
	purger := dedup.Purger{Store: store, Logger: a.log}
	go func() { _ = purger.Run(purging) }()

	if listen != "" {
		return serve(ctx, listen, a.routes(store), out)
	}
	srv := httptest.NewServer(a.routes(store))
	defer srv.Close()
	return demonstrate(ctx, srv.URL, out)
}

func serve(ctx context.Context, addr string, h http.Handler, out io.Writer) error {
	srv := &http.Server{Addr: addr, Handler: h, ReadHeaderTimeout: 5 * time.Second, ReadTimeout: 30 * time.Second}
	failed := make(chan error, 1)
	go func() { failed <- srv.ListenAndServe() }()
	fmt.Fprintf(out, "serving on http://%s; accounts acme and globex, with their name and \"-secret\" as password\n", addr)
	select {
	case err := <-failed:
		return err
	case <-ctx.Done():
	}
	// Handlers that are at work finish, and their answers are stored.
	wait, cancel := context.WithTimeout(context.WithoutCancel(ctx), 30*time.Second)
	defer cancel()
	if err := srv.Shutdown(wait); err != nil && !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	return nil
}

// demonstrate sends what a client may send, and prints the answers.
func demonstrate(ctx context.Context, url string, out io.Writer) error {
	// A new name for each run, so that it can be repeated on one database.
	order := fmt.Sprintf("order-%d", time.Now().UnixNano())
	steps := []struct{ what, account, key, body string }{
		{"a charge", "acme", order, `{"cents": 4200, "description": "first"}`},
		{"its retry, with other spacing", "acme", order, `{"description":"first","cents":4200}`},
		{"the key for something else", "acme", order, `{"cents": 1, "description": "second"}`},
		{"another tenant's same key", "globex", order, `{"cents": 700, "description": "mine"}`},
		{"over the limit", "acme", order + "-b", `{"cents": 999999999, "description": "much"}`},
		{"its retry", "acme", order + "-b", `{"cents": 999999999, "description": "much"}`},
		{"no key", "acme", "", `{"cents": 1, "description": "unkeyed"}`},
	}
	for _, s := range steps {
		req, err := http.NewRequestWithContext(ctx, http.MethodPost, url+"/v1/charges", strings.NewReader(s.body))
		if err != nil {
			return err
		}
		req.SetBasicAuth(s.account, s.account+"-secret")
		req.Header.Set("Content-Type", "application/json")
		if s.key != "" {
			req.Header.Set("Idempotency-Key", s.key)
		}
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			return err
		}
		body, err := io.ReadAll(resp.Body)
		resp.Body.Close()
		if err != nil {
			return err
		}
		replayed := ""
		if resp.Header.Get("Idempotent-Replayed") == "true" {
			replayed = " (replayed)"
		}
		fmt.Fprintf(out, "%-30s %-7s %s%s\n    %s\n", s.what, s.account, resp.Status, replayed, strings.TrimSpace(string(body)))
	}
	return nil
}
