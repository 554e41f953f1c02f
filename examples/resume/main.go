// Resume pays an invoice from a process that is killed while the outcome is
// unknown, and again from another one, which goes on with the same operation:
// it finds the key that the first has stored from its Error.
//
//	go run ./examples/resume
//
// The API charges at once and then answers nothing until it has recovered. The
// first process gives up, stores the key, and is killed before it could do
// anything about it. A process that began anew, with another key, would charge
// the customer twice.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/effectonce/idempotency"
)

func main() {
	var err error
	if len(os.Args) == 4 && os.Args[1] == "pay" {
		err = pay(context.Background(), os.Args[2], os.Args[3], os.Stdout)
	} else {
		err = run(context.Background(), os.Args[0], os.Stdout)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "resume:", err)
		os.Exit(1)
	}
}

// invoice is what the payer keeps on disk: the row of a table, in real life.
type invoice struct {
	Amount int    `json:"amount"`
	Paid   bool   `json:"paid"`
	Key    string `json:"key,omitempty"` // of a payment whose outcome is unknown
}

// pay pays the invoice in the file, or goes on with paying it.
func pay(ctx context.Context, url, file string, out io.Writer) error {
	data, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	var inv invoice
	if err := json.Unmarshal(data, &inv); err != nil {
		return err
	}
	if inv.Key != "" {
		fmt.Fprintln(out, "  goes on with the stored key")
		ctx = idempotency.WithKey(ctx, inv.Key)
	}
	body := fmt.Sprintf(`{"amount":%d}`, inv.Amount)
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, url+"/charges", strings.NewReader(body))
	if err != nil {
		return err
	}
	client := &http.Client{Transport: &idempotency.Transport{
		Retry: idempotency.RetryPolicy{MaxAttempts: 3, MinWait: 10 * time.Millisecond},
	}}
	resp, err := client.Do(req)
	var lost *idempotency.Error
	if errors.As(err, &lost) {
		fmt.Fprintf(out, "  gives up after %d attempts; the server may have acted: %v\n", lost.Attempts, lost.Ambiguous)
		inv.Key = lost.Key
		if err := save(file, inv); err != nil {
			return err
		}
		fmt.Fprintln(out, "  has stored the key")
		time.Sleep(time.Minute) // it is killed in its sleep
		return lost
	}
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	answer, err := io.ReadAll(resp.Body)
	if err != nil {
		return err
	}
	if resp.StatusCode != http.StatusCreated {
		return fmt.Errorf("%s: %s", resp.Status, answer)
	}
	fmt.Fprintf(out, "  is answered: %s\n", answer)
	inv.Paid, inv.Key = true, ""
	return save(file, inv)
}

// save replaces the file in one step: a kill leaves the old one or the new one.
func save(file string, inv invoice) error {
	data, err := json.Marshal(inv)
	if err != nil {
		return err
	}
	if err := os.WriteFile(file+".new", data, 0o600); err != nil {
		return err
	}
	return os.Rename(file+".new", file)
}

// run plays the API, and starts program as the paying process twice.
func run(ctx context.Context, program string, out io.Writer) error {
	api := &charges{asked: map[string]int{}, down: true}
	srv := httptest.NewServer(api)
	defer srv.Close()
	dir, err := os.MkdirTemp("", "resume")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	file := filepath.Join(dir, "invoice.json")
	if err := save(file, invoice{Amount: 500}); err != nil {
		return err
	}

	fmt.Fprintln(out, "the first process")
	first := exec.CommandContext(ctx, program, "pay", srv.URL, file)
	stdout, err := first.StdoutPipe()
	if err != nil {
		return err
	}
	first.Stderr = os.Stderr
	if err := first.Start(); err != nil {
		return err
	}
	if err := copyUntil(out, stdout, "has stored the key"); err != nil {
		_ = first.Process.Kill()
		return errors.Join(err, first.Wait())
	}
	if err := first.Process.Kill(); err != nil {
		return err
	}
	_ = first.Wait() // "signal: killed"
	fmt.Fprintln(out, "  is killed")

	api.recover()
	fmt.Fprintln(out, "the second process")
	second := exec.CommandContext(ctx, program, "pay", srv.URL, file)
	second.Stdout, second.Stderr = out, os.Stderr
	if err := second.Run(); err != nil {
		return err
	}
	api.mu.Lock()
	defer api.mu.Unlock()
	fmt.Fprintf(out, "requests: %d, charges: %d\n", api.requests, len(api.asked))
	return nil
}

// copyUntil copies lines until one has mark in it.
func copyUntil(out io.Writer, in io.Reader, mark string) error {
	var text strings.Builder
	buf := make([]byte, 1)
	for !strings.HasSuffix(text.String(), mark+"\n") {
		if _, err := in.Read(buf); err != nil {
			return fmt.Errorf("the process ended early: %w", err)
		}
		text.Write(buf)
	}
	_, err := io.WriteString(out, text.String())
	return err
}

// charges is the API. It charges once per key.
type charges struct {
	mu       sync.Mutex
	down     bool
	asked    map[string]int // by key
	requests int
}

func (c *charges) recover() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.down = false
}

func (c *charges) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	key := r.Header.Get("Idempotency-Key")
	if key == "" {
		http.Error(w, "a key is required", http.StatusBadRequest)
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.requests++
	c.asked[key]++ // the first time, it charges
	if c.down {
		panic(http.ErrAbortHandler) // cuts the connection
	}
	w.WriteHeader(http.StatusCreated)
	_, _ = io.WriteString(w, "charged")
}
