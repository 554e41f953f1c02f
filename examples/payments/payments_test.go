package main

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
)

func TestDemonstration(t *testing.T) {
	var out strings.Builder
	if err := run(t.Context(), "", "", &out); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"201 Created\n", "201 Created (replayed)", "422", "402 Payment Required (replayed)", "400 Bad Request"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("no %q in:\n%s", want, out.String())
		}
	}
}

// Fifty clients send one charge at once: the limit is taken from once, and all
// of them get the same receipt.
func TestOneChargeForManyRequests(t *testing.T) {
	for name, url := range map[string]string{
		"SQLite":     filepath.Join(t.TempDir(), "test.db"),
		"PostgreSQL": os.Getenv("IDEMPOTENCY_POSTGRES_URL"),
	} {
		t.Run(name, func(t *testing.T) {
			if url == "" {
				url = "postgres://postgres@127.0.0.1:5432/test?sslmode=disable"
			}
			if name == "PostgreSQL" {
				url = ownSchema(t, url)
			}
			db, store, dialect, err := open(t.Context(), url)
			if err != nil {
				t.Fatal(err)
			}
			defer db.Close()
			a := &api{db: db, dialect: dialect, log: slog.New(slog.DiscardHandler)}
			if err := a.addAccount(t.Context(), "acme", "s", 1000); err != nil {
				t.Fatal(err)
			}
			srv := httptest.NewServer(a.routes(store))
			defer srv.Close()

			var mu sync.Mutex
			bodies := map[string]int{}
			var clients sync.WaitGroup
			for range 50 {
				clients.Go(func() {
					for {
						status, body, err := post(t.Context(), srv.URL, "s", "key-1", `{"cents":300}`)
						if err != nil {
							t.Error(err)
							return
						}
						if status == http.StatusConflict || status == http.StatusServiceUnavailable {
							continue // as Retry-After says, only sooner
						}
						mu.Lock()
						bodies[fmt.Sprint(status, " ", body)]++
						mu.Unlock()
						return
					}
				})
			}
			clients.Wait()
			if len(bodies) != 1 {
				t.Errorf("answers: %v, want one for all", bodies)
			}
			var charges, left int
			if err := db.QueryRow(`SELECT (SELECT count(*) FROM charges), limit_left FROM accounts`).Scan(&charges, &left); err != nil {
				t.Fatal(err)
			}
			if charges != 1 || left != 700 {
				t.Errorf("%d charges, %d left of 1000; want 1 and 700", charges, left)
			}
		})
	}
}

func TestUnknownAccountIsRefusedBeforeTheGuard(t *testing.T) {
	db, store, dialect, err := open(t.Context(), filepath.Join(t.TempDir(), "test.db"))
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	a := &api{db: db, dialect: dialect, log: slog.New(slog.DiscardHandler)}
	srv := httptest.NewServer(a.routes(store))
	defer srv.Close()
	if status, _, err := post(t.Context(), srv.URL, "wrong", "key-1", `{"cents":300}`); err != nil || status != http.StatusUnauthorized {
		t.Errorf("status %d, %v; want 401", status, err)
	}
}

func post(ctx context.Context, url, secret, key, body string) (int, string, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, url+"/v1/charges", strings.NewReader(body))
	if err != nil {
		return 0, "", err
	}
	req.SetBasicAuth("acme", secret)
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("Idempotency-Key", key)
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return 0, "", err
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	return resp.StatusCode, string(b), err
}
