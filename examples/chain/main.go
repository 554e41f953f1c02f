// Chain runs three services, order, payment and ledger, each a process with a
// database of its own, and sends orders through them. The one in the middle is
// killed at every step in turn and started again: one order stays one charge
// and one entry in the ledger, since each service derives the key of its call
// from the operation that it is in.
//
//	go run ./examples/chain
package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strconv"
	"time"

	"github.com/effectonce/idempotency"
)

func main() {
	name := flag.String("service", "", "run as this service (the program starts itself so)")
	listen := flag.String("listen", "", "with -service: address")
	db := flag.String("db", "", "with -service: SQLite file")
	next := flag.String("next", "", "with -service: URL of the next service")
	crash := flag.Int("crash", 0, "with -service: step to die at")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	var err error
	if *name != "" {
		err = (&service{name: *name, next: *next, step: "next", crash: *crash}).serve(ctx, *listen, *db)
	} else {
		err = run(ctx, os.Stdout, func(args ...string) *exec.Cmd { return exec.Command(os.Args[0], args...) })
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "chain:", err)
		os.Exit(1)
	}
}

// process is a service in a process of its own.
type process struct {
	name, addr, db, next string
	self                 func(args ...string) *exec.Cmd
	cmd                  *exec.Cmd
	ended                chan struct{}
}

func (p *process) start(crash int) error {
	p.cmd = p.self("-service", p.name, "-listen", p.addr, "-db", p.db, "-next", p.next, "-crash", strconv.Itoa(crash))
	p.cmd.Stderr = os.Stderr
	out, err := p.cmd.StdoutPipe()
	if err != nil {
		return err
	}
	if err := p.cmd.Start(); err != nil {
		return err
	}
	lines := bufio.NewScanner(out)
	ready := false
	for !ready && lines.Scan() {
		ready = lines.Text() == "ready"
	}
	p.ended = make(chan struct{})
	go func(cmd *exec.Cmd, ended chan struct{}) {
		_, _ = io.Copy(io.Discard, out)
		_ = cmd.Wait()
		close(ended)
	}(p.cmd, p.ended)
	if !ready {
		<-p.ended
		return fmt.Errorf("%s did not start", p.name)
	}
	return nil
}

func (p *process) stop() {
	if p.cmd != nil {
		_ = p.cmd.Process.Kill()
		<-p.ended
	}
}

// count is how many rows the service has written for an order.
func (p *process) count(order string) (n int, err error) {
	db, err := openTable(p.db)
	if err != nil {
		return 0, err
	}
	defer db.Close()
	err = db.QueryRow(`SELECT count(*) FROM done WHERE name = ?`, order).Scan(&n)
	return n, err
}

func run(ctx context.Context, out io.Writer, self func(args ...string) *exec.Cmd) error {
	dir, err := os.MkdirTemp("", "chain")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	var chain [3]*process
	next := ""
	for i, name := range []string{"ledger", "payment", "order"} {
		addr, err := freeAddr()
		if err != nil {
			return err
		}
		p := &process{name: name, addr: addr, db: filepath.Join(dir, name+".db"), next: next, self: self}
		next = "http://" + addr + "/"
		chain[2-i] = p
		if name != "payment" {
			if err := p.start(0); err != nil {
				return err
			}
		}
		defer p.stop()
	}
	payment := chain[1]
	client := &http.Client{Transport: &idempotency.Transport{}}
	fmt.Fprintf(out, "%-58s %6s %8s %7s\n", "payment is killed when", "orders", "charges", "entries")
	for crash := range steps {
		if err := payment.start(crash); err != nil {
			return err
		}
		restarted := make(chan error, 1)
		if crash > 0 { // whoever watches over it starts it again
			first := payment.ended
			go func() { <-first; restarted <- payment.start(0) }()
		} else {
			restarted <- nil
		}
		name := "order-" + strconv.Itoa(crash)
		if err := place(ctx, client, next, order{Order: name, Cents: 4200}); err != nil {
			return fmt.Errorf("step %d: %w", crash, err)
		}
		if err := <-restarted; err != nil {
			return err
		}
		what := "(never)"
		if crash > 0 {
			what = steps[crash]
		}
		row := [3]int{}
		for i, p := range chain {
			if row[i], err = p.count(name); err != nil {
				return err
			}
		}
		fmt.Fprintf(out, "%-58s %6d %8d %7d\n", what, row[0], row[1], row[2])
		if row != [3]int{1, 1, 1} {
			return errors.New("an order was lost or doubled")
		}
		payment.stop()
	}
	return nil
}

// place sends an order and waits for its answer.
func place(ctx context.Context, client *http.Client, url string, o order) error {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	body, err := json.Marshal(o)
	if err != nil {
		return err
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, url, bytes.NewReader(body))
	if err != nil {
		return err
	}
	req.Header.Set("Content-Type", "application/json")
	resp, err := client.Do(req)
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
	return nil
}

func freeAddr() (string, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return "", err
	}
	defer l.Close()
	return l.Addr().String(), nil
}
