package main

import (
	"database/sql"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"
)

// ownSchema makes a schema for one test and returns a URL that works in it. It
// skips the test where there is no PostgreSQL, and fails it if CI=true.
func ownSchema(t *testing.T, url string) string {
	t.Helper()
	db, err := sql.Open("pgx", url)
	if err == nil {
		err = db.PingContext(t.Context())
	}
	if err != nil {
		if os.Getenv("CI") == "true" {
			t.Fatalf("no PostgreSQL (IDEMPOTENCY_POSTGRES_URL): %v", err)
		}
		t.Skipf("no PostgreSQL (IDEMPOTENCY_POSTGRES_URL): %v", err)
	}
	schema := fmt.Sprintf("payments_%d", time.Now().UnixNano())
	if _, err := db.Exec(`CREATE SCHEMA ` + schema); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_, _ = db.Exec(`DROP SCHEMA ` + schema + ` CASCADE`)
		db.Close()
	})
	separator := "?"
	if strings.Contains(url, "?") {
		separator = "&"
	}
	return url + separator + "search_path=" + schema
}
