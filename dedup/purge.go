package dedup

import (
	"context"
	"fmt"
	"log/slog"
	"time"
)

// Defaults of [Purger].
const (
	DefaultPurgeInterval = time.Minute
	DefaultPurgeBatch    = 1000
)

// Purger removes expired rows now and then. Run as many as there are nodes, or
// one; they don't get in each other's way.
type Purger struct {
	Store    Store
	Interval time.Duration // between rounds (a minute if 0)
	Batch    int           // rows a statement (1,000 if 0)
	Logger   *slog.Logger  // told of failed rounds; nil for none
}

// Run purges at once and then at each interval, until ctx ends, and returns
// the context's error. A failed round is logged and the next one tries again.
// It needs a goroutine of the caller's:
//
//	go purger.Run(ctx)
func (p *Purger) Run(ctx context.Context) error {
	if p.Store == nil || p.Interval < 0 || p.Batch < 0 {
		return fmt.Errorf("%w: a Purger needs a Store, and neither Interval nor Batch may be negative", ErrConfig)
	}
	t := time.NewTicker(orDefault(p.Interval, DefaultPurgeInterval))
	defer t.Stop()
	for {
		if _, err := p.Once(ctx); err != nil && ctx.Err() == nil && p.Logger != nil {
			p.Logger.LogAttrs(ctx, slog.LevelWarn, "dedup: purge failed", slog.Any("err", err))
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-t.C:
		}
	}
}

// Once removes what has expired, batch by batch, and returns how many rows
// that were.
func (p *Purger) Once(ctx context.Context) (int, error) {
	batch := p.Batch
	if batch == 0 {
		batch = DefaultPurgeBatch
	}
	for total := 0; ; {
		n, err := p.Store.Purge(ctx, batch)
		total += n
		if err != nil || n < batch {
			return total, err
		}
		if err := ctx.Err(); err != nil {
			return total, err
		}
	}
}
