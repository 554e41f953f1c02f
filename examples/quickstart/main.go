// Quickstart charges a few hundred cards over a network that loses, cuts,
// delays and duplicates what it carries, and shows that each card is charged
// once. Then it does the same without idempotency keys.
//
//	go run ./examples/quickstart
//
// Client, bad network and server run in this one process, over real HTTP on
// loopback, with the ledger in a SQLite file. With -db the file is kept: kill
// the program half way, run it again on the same file, and the orders that were
// charged already are answered from what was stored.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"time"
)

type config struct {
	count, concurrency int
	seed               uint64
	file               string
	contrast           bool
	faults             faults
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	cfg, err := parse(os.Args[1:], os.Stderr)
	if err != nil {
		if errors.Is(err, flag.ErrHelp) {
			return
		}
		os.Exit(2)
	}
	if err := run(ctx, cfg, os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "quickstart:", err)
		os.Exit(1)
	}
}

func parse(args []string, out io.Writer) (config, error) {
	var cfg config
	f := flag.NewFlagSet("quickstart", flag.ContinueOnError)
	f.SetOutput(out)
	f.IntVar(&cfg.count, "n", 300, "how many charges")
	f.IntVar(&cfg.concurrency, "c", 16, "how many at once")
	f.Uint64Var(&cfg.seed, "seed", 1, "which faults happen to which request")
	f.StringVar(&cfg.file, "db", "", "SQLite file to use and keep (default: a temporary one)")
	f.BoolVar(&cfg.contrast, "contrast", true, "also run without keys")
	f.Float64Var(&cfg.faults.dropRequest, "drop-request", 0.10, "rate of requests lost before the server")
	f.Float64Var(&cfg.faults.dropAnswer, "drop-answer", 0.15, "rate of answers lost after the effect")
	f.Float64Var(&cfg.faults.cutBody, "cut-body", 0.10, "rate of answers cut half way")
	f.Float64Var(&cfg.faults.duplicate, "duplicate", 0.10, "rate of requests that arrive twice")
	f.DurationVar(&cfg.faults.maxDelay, "max-delay", 20*time.Millisecond, "longest delay of a request")
	if err := f.Parse(args); err != nil {
		return cfg, err
	}
	err := cfg.check(f.NArg())
	if err != nil {
		fmt.Fprintln(out, "quickstart:", err)
	}
	return cfg, err
}

func (c config) check(extra int) error {
	switch {
	case extra > 0:
		return errors.New("takes flags only; see -h")
	case c.count < 1 || c.concurrency < 1:
		return errors.New("-n and -c must be at least 1")
	case c.faults.maxDelay < 0:
		return errors.New("-max-delay must not be negative")
	}
	for _, rate := range []float64{c.faults.dropRequest, c.faults.dropAnswer, c.faults.cutBody, c.faults.duplicate} {
		if !(rate >= 0 && rate <= 0.9) {
			return errors.New("rates go from 0 to 0.9: a network that loses all carries nothing")
		}
	}
	return nil
}

func run(ctx context.Context, cfg config, out io.Writer) error {
	file := cfg.file
	if file == "" {
		dir, err := os.MkdirTemp("", "quickstart")
		if err != nil {
			return err
		}
		defer os.RemoveAll(dir)
		file = filepath.Join(dir, "ledger.db")
	}
	bank, store, err := openBank(ctx, file)
	if err != nil {
		return err
	}
	defer bank.db.Close()

	fmt.Fprintf(out, "%d charges, %d at once, over a network that drops %.0f%% of requests and %.0f%% of answers,\n"+
		"cuts %.0f%% of answers half way, duplicates %.0f%% and delays all (seed %d)\n\n",
		cfg.count, cfg.concurrency, 100*cfg.faults.dropRequest, 100*cfg.faults.dropAnswer,
		100*cfg.faults.cutBody, 100*cfg.faults.duplicate, cfg.seed)

	runs := []*campaign{{title: "with keys", orders: fmt.Sprintf("order-%d-", cfg.seed), keyed: true}}
	if cfg.contrast {
		runs = append(runs, &campaign{title: "without keys", orders: fmt.Sprintf("plain-%d-", cfg.seed)})
	}
	for _, c := range runs {
		if err := c.run(ctx, cfg, bank, store, out); err != nil {
			if ctx.Err() != nil && cfg.file != "" {
				return fmt.Errorf("interrupted; run it again with -db %s to go on: %w", cfg.file, ctx.Err())
			}
			return err
		}
	}
	printTable(out, runs)
	if c := runs[0]; c.doubles() > 0 || c.lost() > 0 {
		return fmt.Errorf("%d double and %d lost charges with keys: please report this with the seed", c.doubles(), c.lost())
	}
	return nil
}
