// Outbox takes orders and ships each of them, through a broker, while the
// process that does both is killed again and again. An order and its event are
// written in one transaction; a relay publishes the event to NATS JetStream; a
// consumer writes the shipment in the transaction that marks the event as
// processed. At the end there is one shipment for each order.
//
//	go run ./examples/outbox                   # SQLite file and NATS server of its own
//	go run ./examples/outbox -nats nats://127.0.0.1:4222 -db postgres://postgres@127.0.0.1:5432/test?sslmode=disable
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strconv"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/effectonce/idempotency/dedup"
)

// settings are those of the worker too, which gets them by its environment.
type settings struct {
	db, nats, stream string
	orders           int
}

const workerVariable = "OUTBOX_EXAMPLE_WORKER"

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if err := start(ctx); err != nil {
		fmt.Fprintln(os.Stderr, "outbox:", err)
		os.Exit(1)
	}
}

func start(ctx context.Context) error {
	if s, ok := workerSettings(); ok {
		return work(ctx, s)
	}
	var s settings
	flag.StringVar(&s.db, "db", "", "SQLite file or postgres:// URL (default: a temporary file)")
	flag.StringVar(&s.nats, "nats", "", "URL of a NATS server with JetStream (default: one in this process)")
	flag.IntVar(&s.orders, "orders", 300, "how many orders to take")
	seed := flag.Uint64("seed", 1, "of the moments at which the worker is killed")
	flag.Parse()
	res, err := run(ctx, s, *seed)
	if err != nil {
		return err
	}
	return res.print(os.Stdout)
}

// result is what is left when all orders are shipped.
type result struct {
	kills, orders, shipped, published int
	doubled, lost                     int
}

func (r result) print(w io.Writer) error {
	_, err := fmt.Fprintf(w, `worker killed        %6d times
orders committed     %6d
events in the stream %6d
shipments            %6d
shipped twice        %6d
never shipped        %6d
`, r.kills, r.orders, r.published, r.shipped, r.doubled, r.lost)
	return err
}

// run kills workers until everything is shipped.
func run(ctx context.Context, s settings, seed uint64) (res result, err error) {
	dir, err := os.MkdirTemp("", "outbox")
	if err != nil {
		return res, err
	}
	defer os.RemoveAll(dir)
	if s.db == "" {
		s.db = filepath.Join(dir, "orders.db")
	}
	if s.nats == "" {
		url, stop, err := embedded(dir)
		if err != nil {
			return res, err
		}
		defer stop()
		s.nats = url
	}
	s.stream = "orders-" + dedup.NewToken().String()[:8]
	drop, published, err := makeStream(ctx, s)
	if err != nil {
		return res, err
	}
	defer drop()
	shop, err := open(ctx, s)
	if err != nil {
		return res, err
	}
	defer shop.close()
	if err := shop.migrate(ctx); err != nil {
		return res, err
	}

	dice := rand.New(rand.NewPCG(seed, 0))
	for done := false; !done; {
		w, err := startWorker(ctx, s)
		if err != nil {
			return res, err
		}
		life := time.NewTimer(time.Duration(50+dice.IntN(250)) * time.Millisecond)
		select {
		case <-life.C:
		case <-ctx.Done():
		}
		if err := w.Process.Kill(); err != nil {
			return res, err
		}
		res.kills++
		if err := w.Wait(); err == nil {
			return res, errors.New("the worker ended by itself")
		}
		if done, err = shop.done(ctx); err != nil {
			return res, err
		}
	}
	res.orders, res.shipped, res.doubled, res.lost, err = shop.count(ctx)
	if err != nil {
		return res, err
	}
	res.published, err = published(ctx)
	return res, err
}

func embedded(dir string) (url string, stop func(), err error) {
	ns, err := server.NewServer(&server.Options{Host: "127.0.0.1", Port: server.RANDOM_PORT, JetStream: true, StoreDir: filepath.Join(dir, "nats"), NoSigs: true, NoLog: true})
	if err != nil {
		return "", nil, err
	}
	ns.Start()
	if !ns.ReadyForConnections(10 * time.Second) {
		ns.Shutdown()
		return "", nil, errors.New("the NATS server does not start")
	}
	return ns.ClientURL(), func() { ns.Shutdown(); ns.WaitForShutdown() }, nil
}

func makeStream(ctx context.Context, s settings) (drop func(), published func(context.Context) (int, error), err error) {
	nc, err := nats.Connect(s.nats)
	if err != nil {
		return nil, nil, err
	}
	js, err := jetstream.New(nc)
	if err != nil {
		nc.Close()
		return nil, nil, err
	}
	stream, err := js.CreateStream(ctx, jetstream.StreamConfig{Name: s.stream, Subjects: []string{s.stream}})
	if err != nil {
		nc.Close()
		return nil, nil, err
	}
	published = func(ctx context.Context) (int, error) {
		info, err := stream.Info(ctx)
		if err != nil {
			return 0, err
		}
		return int(info.State.Msgs), nil
	}
	return func() {
		_ = js.DeleteStream(context.WithoutCancel(ctx), s.stream)
		nc.Close()
	}, published, nil
}

func startWorker(ctx context.Context, s settings) (*exec.Cmd, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	cmd := exec.CommandContext(ctx, self)
	cmd.Env = append(os.Environ(), workerVariable+"="+strconv.Itoa(s.orders),
		workerVariable+"_DB="+s.db, workerVariable+"_NATS="+s.nats, workerVariable+"_STREAM="+s.stream)
	cmd.Stderr = os.Stderr
	return cmd, cmd.Start()
}

func workerSettings() (settings, bool) {
	n, err := strconv.Atoi(os.Getenv(workerVariable))
	return settings{os.Getenv(workerVariable + "_DB"), os.Getenv(workerVariable + "_NATS"), os.Getenv(workerVariable + "_STREAM"), n}, err == nil
}
