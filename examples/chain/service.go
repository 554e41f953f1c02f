package main

import (
	"bytes"
	"context"
	"database/sql"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"syscall"
	"time"

	"github.com/effectonce/idempotency"
	"github.com/effectonce/idempotency/dedup"
	"github.com/effectonce/idempotency/dedup/sqlstore"
	sqlitedb "github.com/effectonce/idempotency/drivers/sqlite"
	"github.com/effectonce/idempotency/server"
)

// service is one of order, payment and ledger. Each writes a row of its own and
// then asks the next one; the ledger is the last.
type service struct {
	name   string
	next   string // URL of the next service, or ""
	step   string // what its call of the next one is named
	crash  int    // step to die at, 0 for none
	db     *sql.DB
	client *http.Client
}

// The steps at which a service can be killed, in their order.
var steps = []string{
	1: "a request has come",
	2: "the key is claimed",
	3: "its own row is written",
	4: "the next service has answered",
	5: "the answer is stored, and not yet sent",
}

type order struct {
	Order string `json:"order"`
	Cents int    `json:"cents"`
}

// openTable opens a service's database.
func openTable(file string) (*sql.DB, error) {
	db, err := sqlitedb.Open(file)
	if err != nil {
		return nil, err
	}
	_, err = db.Exec(`CREATE TABLE IF NOT EXISTS done (
		operation TEXT NOT NULL, name TEXT NOT NULL, cents INTEGER NOT NULL)`)
	return db, err
}

func (s *service) serve(ctx context.Context, addr, file string) error {
	db, err := openTable(file)
	if err != nil {
		return err
	}
	defer db.Close()
	s.db = db
	store, err := sqlitedb.NewStore(db, sqlstore.Options{})
	if err == nil {
		err = store.Migrate(ctx)
	}
	if err != nil {
		return err
	}
	// Patient enough for a service that has to be started again.
	s.client = &http.Client{Transport: &idempotency.Transport{Retry: idempotency.RetryPolicy{
		MaxAttempts: 100, MinWait: 20 * time.Millisecond, MaxWait: 200 * time.Millisecond,
	}}}
	guard := server.New(store, server.Options{
		Scope:    server.SingleTenant,
		Required: true,
		// The call of the next service is an effect elsewhere, so this is
		// lease mode. Running again is safe: the call has a derived key, and
		// the own row is written once by design.
		Mode:      dedup.Lease,
		Abandoned: dedup.Reexecute,
		Lease:     time.Second,
		Wait:      3 * time.Second,
	})
	handler := guard.Handler(http.HandlerFunc(s.handle))
	mux := http.NewServeMux()
	mux.HandleFunc("POST /", func(w http.ResponseWriter, r *http.Request) {
		s.reached(1)
		handler.ServeHTTP(w, r)
		s.reached(5)
	})
	l, err := net.Listen("tcp", addr)
	if err != nil {
		return err
	}
	fmt.Println("ready")
	return (&http.Server{Handler: mux, ReadHeaderTimeout: 5 * time.Second}).Serve(l)
}

func (s *service) handle(w http.ResponseWriter, r *http.Request) {
	var o order
	if err := json.NewDecoder(r.Body).Decode(&o); err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	s.reached(2)
	if err := s.write(r.Context(), o); err != nil {
		// Nothing has been asked of the next service yet.
		dedup.NotExecuted(r.Context())
		http.Error(w, "try again later", http.StatusServiceUnavailable)
		return
	}
	s.reached(3)
	answer, err := s.askNext(r.Context(), o)
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadGateway)
		return
	}
	s.reached(4)
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(http.StatusCreated)
	_, _ = fmt.Fprintf(w, `{"%s":"done"%s}`, s.name, answer)
}

// write records the order. Written once by design: the row carries the
// operation's key, and a second run finds it there.
func (s *service) write(ctx context.Context, o order) error {
	key, _ := dedup.KeyFrom(ctx)
	_, err := s.db.ExecContext(ctx, `INSERT INTO done (operation, name, cents)
		SELECT ?, ?, ? WHERE NOT EXISTS (SELECT 1 FROM done WHERE operation = ?)`, key.ID, o.Order, o.Cents, key.ID)
	return err
}

// askNext calls the next service under the key that belongs to this operation
// and this step, so that a second run of the handler sends the same one.
func (s *service) askNext(ctx context.Context, o order) (string, error) {
	if s.next == "" {
		return "", nil
	}
	body, err := json.Marshal(o)
	if err != nil {
		return "", err
	}
	ctx = idempotency.WithStep(ctx, s.step)
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, s.next, bytes.NewReader(body))
	if err != nil {
		return "", err
	}
	req.Header.Set("Content-Type", "application/json")
	resp, err := s.client.Do(req)
	if err != nil {
		return "", err
	}
	defer resp.Body.Close()
	answer, err := io.ReadAll(resp.Body)
	if err != nil {
		return "", err
	}
	if resp.StatusCode != http.StatusCreated {
		return "", fmt.Errorf("%s answered %s", s.next, resp.Status)
	}
	return fmt.Sprintf(`,"next":%s`, answer), nil
}

// reached dies at the step that the service was told to die at.
func (s *service) reached(step int) {
	if s.crash == step {
		_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
		select {}
	}
}
