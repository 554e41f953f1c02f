package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"sync"
	"time"

	"github.com/effectonce/idempotency"
	"github.com/effectonce/idempotency/dedup/sqlstore"
)

// campaign charges a number of orders and then audits the ledger.
type campaign struct {
	title  string
	orders string // prefix of the orders' names
	keyed  bool

	total   int
	net     *network
	earlier int // orders charged before it began
	effects int
	charged map[string]int
	paid    map[string]receipt // what the client was told
}

func (c *campaign) run(ctx context.Context, cfg config, b *bank, store *sqlstore.Store, out io.Writer) error {
	c.total = cfg.count
	if !c.keyed {
		// The contrast has no memory to go on from: it starts afresh.
		if _, err := b.db.ExecContext(ctx, `DELETE FROM charges WHERE order_id LIKE ? || '%'`, c.orders); err != nil {
			return err
		}
	}
	before, err := b.effects(ctx, c.orders)
	if err != nil {
		return err
	}
	for i := range c.total {
		c.earlier += min(1, before[c.order(i)])
	}

	srv := httptest.NewServer(b.routes(store))
	defer srv.Close()
	c.net = newNetwork(srv.URL, cfg.faults, cfg.seed)
	proxy := httptest.NewUnstartedServer(c.net)
	proxy.Config.ErrorLog = quiet() // it drops connections on purpose
	proxy.Start()
	defer proxy.Close()

	if err := c.chargeAll(ctx, cfg.concurrency, proxy.URL, out); err != nil {
		return err
	}
	return c.audit(ctx, b)
}

func (c *campaign) order(i int) string { return fmt.Sprintf("%s%04d", c.orders, i) }

func (c *campaign) chargeAll(ctx context.Context, concurrency int, url string, out io.Writer) error {
	client := c.client()
	defer client.CloseIdleConnections()
	c.paid = map[string]receipt{}
	var mu sync.Mutex
	var firstErr error
	bar := newProgress(out, c.title, c.total)

	jobs := make(chan int)
	var workers sync.WaitGroup
	for range concurrency {
		workers.Go(func() {
			for i := range jobs {
				got, err := pay(ctx, client, url, charge{Order: c.order(i), Cents: 100 + i}, c.keyed)
				mu.Lock()
				if err == nil {
					c.paid[got.Order] = got
					bar.show(len(c.paid), c.net)
				} else if firstErr == nil {
					firstErr = err
				}
				mu.Unlock()
			}
		})
	}
	for i := 0; i < c.total && ctx.Err() == nil; i++ {
		jobs <- i
	}
	close(jobs)
	workers.Wait()
	if ctx.Err() != nil {
		return ctx.Err()
	}
	return firstErr
}

// client is the whole difference between the two runs.
func (c *campaign) client() *http.Client {
	if !c.keyed {
		return &http.Client{Transport: http.DefaultTransport.(*http.Transport).Clone()}
	}
	return &http.Client{Transport: &idempotency.Transport{
		Base: http.DefaultTransport.(*http.Transport).Clone(),
		Retry: idempotency.RetryPolicy{
			MaxAttempts: 8,
			MinWait:     5 * time.Millisecond, // the network is on this machine
			MaxWait:     100 * time.Millisecond,
		},
	}}
}

// pay charges until it knows the answer, as an application must. With keys, a
// transport that gave up is simply asked again with the same key.
func pay(ctx context.Context, client *http.Client, url string, c charge, keyed bool) (receipt, error) {
	if keyed {
		// Made from the order, so that a later run of this program sends the
		// same key for the same order.
		ctx = idempotency.WithKey(ctx, idempotency.Deterministic("quickstart", c.Order))
	}
	const patience = 50
	for try := 0; ; try++ {
		got, err := payOnce(ctx, client, url, c)
		if err == nil {
			return got, nil
		}
		if ctx.Err() != nil {
			return receipt{}, ctx.Err()
		}
		if try == patience {
			return receipt{}, fmt.Errorf("order %s: no answer after %d tries: %w", c.Order, try, err)
		}
	}
}

func payOnce(ctx context.Context, client *http.Client, url string, c charge) (receipt, error) {
	body, err := json.Marshal(c)
	if err != nil {
		return receipt{}, err
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, url+"/charges", bytes.NewReader(body))
	if err != nil {
		return receipt{}, err
	}
	req.Header.Set("Content-Type", "application/json")
	resp, err := client.Do(req)
	if err != nil {
		return receipt{}, err
	}
	defer resp.Body.Close()
	answer, err := io.ReadAll(resp.Body)
	if err != nil {
		return receipt{}, err
	}
	if resp.StatusCode != http.StatusCreated {
		return receipt{}, fmt.Errorf("status %s: %.200s", resp.Status, answer)
	}
	var got receipt
	if err := json.Unmarshal(answer, &got); err != nil {
		return receipt{}, err
	}
	return got, nil
}

// audit compares what the client was told with what is in the ledger.
func (c *campaign) audit(ctx context.Context, b *bank) error {
	charged, err := b.effects(ctx, c.orders)
	if err != nil {
		return err
	}
	c.charged = map[string]int{}
	for i := range c.total {
		n := charged[c.order(i)]
		c.charged[c.order(i)] = n
		c.effects += n
	}
	return nil
}

// doubles is how many charges there are beyond one an order.
func (c *campaign) doubles() int {
	n := 0
	for _, times := range c.charged {
		n += max(0, times-1)
	}
	return n
}

// lost is how many orders have no charge, or were never acknowledged.
func (c *campaign) lost() int {
	n := 0
	for order, times := range c.charged {
		if _, acknowledged := c.paid[order]; times == 0 || !acknowledged {
			n++
		}
	}
	return n
}
