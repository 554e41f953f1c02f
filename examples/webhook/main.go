// Webhook receives payment events as a provider sends them: signed in the manner
// of Standard Webhooks, and delivered again and again, sometimes twice at once.
// Each pays one invoice, once, since the mark that it was processed is committed
// in the transaction that pays.
//
//	go run ./examples/webhook                  # on a temporary SQLite file
//	go run ./examples/webhook -db postgres://postgres@127.0.0.1:5432/test?sslmode=disable
//
// It plays the provider too, and prints what became of each delivery.
package main

import (
	"bytes"
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"text/tabwriter"
	"time"

	_ "github.com/jackc/pgx/v5/stdlib"
	standardwebhooks "github.com/standard-webhooks/standard-webhooks/libraries/go"

	"github.com/effectonce/idempotency/consumer"
	sqlitedb "github.com/effectonce/idempotency/drivers/sqlite"
)

// secret is shared with the provider. A real one comes from its dashboard.
const secret = "whsec_C2FVsBQIhrscChlQIMV+b5sSYspob7oD"

func main() {
	db := flag.String("db", "", "SQLite file or postgres:// URL (default: a temporary file)")
	flag.Parse()
	if err := run(context.Background(), *db, os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "webhook:", err)
		os.Exit(1)
	}
}

// books is the receiving side: the invoices, and the handler of events.
type books struct {
	db    *sql.DB
	inbox *consumer.Inbox
	hook  *standardwebhooks.Webhook

	// fails, if set, has the handler fail in the middle of an event.
	fails func(event string) bool
}

func open(ctx context.Context, name string) (*books, error) {
	b := &books{inbox: &consumer.Inbox{Group: "invoices", Dialect: consumer.SQLite}}
	var err error
	if strings.HasPrefix(name, "postgres") {
		b.inbox.Dialect = consumer.Postgres
		b.db, err = sql.Open("pgx", name)
	} else {
		b.db, err = sqlitedb.Open(name)
	}
	if err != nil {
		return nil, err
	}
	b.inbox.DB = b.db
	if err := b.inbox.Migrate(ctx); err != nil {
		return nil, err
	}
	if _, err := b.db.ExecContext(ctx, `CREATE TABLE IF NOT EXISTS payments (invoice TEXT NOT NULL, cents INTEGER NOT NULL)`); err != nil {
		return nil, err
	}
	b.hook, err = standardwebhooks.NewWebhook(secret)
	return b, err
}

type event struct {
	Type string `json:"type"`
	Data struct {
		Invoice string `json:"invoice"`
		Cents   int64  `json:"cents"`
	} `json:"data"`
}

// endpoint is what the provider calls.
func (b *books) endpoint() http.Handler {
	return &consumer.Webhook{
		Consumer: b.inbox,
		Verify:   func(r *http.Request, body []byte) error { return b.hook.Verify(body, r.Header) },
		ID:       consumer.StandardWebhooksID,
		Handle: func(ctx context.Context, r *http.Request, body []byte) error {
			var e event
			if err := json.Unmarshal(body, &e); err != nil {
				return fmt.Errorf("%w: %w", consumer.ErrPoison, err)
			}
			// The transaction that the event is marked in. There is nothing in
			// this table that would refuse a second payment.
			_, err := consumer.Tx(ctx).ExecContext(ctx, `INSERT INTO payments (invoice, cents) VALUES ($1, $2)`, e.Data.Invoice, e.Data.Cents)
			if err == nil && b.fails != nil && b.fails(e.Data.Invoice) {
				return errors.New("the mail server is down")
			}
			return err
		},
	}
}

// payments returns how often each invoice was paid.
func (b *books) payments(ctx context.Context) (map[string]int, error) {
	rows, err := b.db.QueryContext(ctx, `SELECT invoice, count(*) FROM payments GROUP BY invoice`)
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	paid := map[string]int{}
	for rows.Next() {
		var invoice string
		var n int
		if err := rows.Scan(&invoice, &n); err != nil {
			return nil, err
		}
		paid[invoice] = n
	}
	return paid, rows.Err()
}

// deliver sends an event as the provider does, and returns the answer's status.
func deliver(ctx context.Context, url, id, invoice, key string) (int, error) {
	var e event
	e.Type, e.Data.Invoice, e.Data.Cents = "invoice.paid", invoice, 4200
	body, err := json.Marshal(e)
	if err != nil {
		return 0, err
	}
	signer, err := standardwebhooks.NewWebhook(key)
	if err != nil {
		return 0, err
	}
	now := time.Now()
	signature, err := signer.Sign(id, now, body)
	if err != nil {
		return 0, err
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, url, bytes.NewReader(body))
	if err != nil {
		return 0, err
	}
	req.Header.Set("webhook-id", id)
	req.Header.Set("webhook-timestamp", fmt.Sprint(now.Unix()))
	req.Header.Set("webhook-signature", signature)
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return 0, err
	}
	defer resp.Body.Close()
	_, err = io.Copy(io.Discard, resp.Body)
	return resp.StatusCode, err
}

func run(ctx context.Context, name string, out io.Writer) error {
	if name == "" {
		dir, err := os.MkdirTemp("", "webhook")
		if err != nil {
			return err
		}
		defer os.RemoveAll(dir)
		name = filepath.Join(dir, "webhook.db")
	}
	b, err := open(ctx, name)
	if err != nil {
		return err
	}
	defer b.db.Close()
	// Invoice 2 fails in the middle, the first time.
	var once sync.Once
	b.fails = func(invoice string) (now bool) {
		if strings.HasSuffix(invoice, "-2") {
			once.Do(func() { now = true })
		}
		return now
	}
	srv := httptest.NewServer(b.endpoint())
	defer srv.Close()

	prefix := fmt.Sprint("in-", time.Now().UnixNano()) // so that it can be run again on one database
	table := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	fmt.Fprintln(table, "invoice\tanswers to its deliveries\tpayments")
	for n := range 4 {
		invoice := fmt.Sprintf("%s-%d", prefix, n)
		answers := make([]string, 5)
		var all sync.WaitGroup
		for i := range answers {
			send := func() {
				code, err := deliver(ctx, srv.URL, "msg_"+invoice, invoice, secret)
				answers[i] = fmt.Sprint(code)
				if err != nil {
					answers[i] = err.Error()
				}
			}
			if n == 1 {
				all.Go(send) // all at once
			} else {
				send()
			}
		}
		all.Wait()
		paid, err := b.payments(ctx)
		if err != nil {
			return err
		}
		fmt.Fprintf(table, "%d\t%s\t%d\n", n, strings.Join(answers, " "), paid[invoice])
	}
	forged := prefix + "-forged"
	code, err := deliver(ctx, srv.URL, "msg_"+forged, forged, "whsec_"+"bm90IHRoZSBzZWNyZXQgYXQgYWxs")
	if err != nil {
		return err
	}
	paid, err := b.payments(ctx)
	if err != nil {
		return err
	}
	fmt.Fprintf(table, "forged\t%d\t%d\n", code, paid[forged])
	return table.Flush()
}
