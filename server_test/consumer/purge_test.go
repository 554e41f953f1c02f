package consumer_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"

	"github.com/effectonce/idempotency/consumer"
)

type purger interface {
	Migrate(ctx context.Context) error
	Purge(ctx context.Context, limit int) (int, error)
}

// age moves the marks of the events named like pattern behind the retention.
func (f *fixture) age(t *testing.T, pattern string) {
	t.Helper()
	change := map[consumer.Dialect]string{
		consumer.Postgres: `processed_at = processed_at - interval '8 days'`,
		consumer.MySQL:    `processed_at = processed_at - INTERVAL 8 DAY`,
		consumer.SQLite:   `processed_at = processed_at - 8 * 24 * 3600 * 1000`,
	}[f.dialect]
	_, err := f.db.Exec(`UPDATE ` + f.table + ` SET ` + change + ` WHERE event_id LIKE '` + pattern + `'`)
	must(t, err)
}

func nothing(context.Context) error { return nil }

// Purge removes what is past its retention, in bounded batches, and nothing
// else; an event being handled meanwhile is in nobody's way.
func TestPurge(t *testing.T) {
	over(t, inboxKinds, func(t *testing.T, f *fixture) {
		c := f.consumer("g")
		for i := range 20 {
			wantStatus(t, c.Handle(t.Context(), fmt.Sprintf("old-%d", i), nothing), consumer.Done)
		}
		f.age(t, "old-%")
		for i := range 5 {
			wantStatus(t, c.Handle(t.Context(), fmt.Sprintf("new-%d", i), nothing), consumer.Done)
		}
		p := c.(purger)
		purge := func() {
			for _, want := range []int{8, 8, 4, 0} {
				if n, err := p.Purge(t.Context(), 8); n != want || err != nil {
					t.Errorf("purged %d, %v; want %d", n, err, want)
				}
			}
		}
		if f.dialect == consumer.SQLite { // which has one writer
			purge()
		} else {
			wantStatus(t, c.Handle(t.Context(), "running", func(context.Context) error {
				purge()
				return nil
			}), consumer.Done)
		}
		for i := range 5 {
			if r := c.Handle(t.Context(), fmt.Sprintf("new-%d", i), nothing); !r.Duplicate {
				t.Errorf("new-%d was forgotten", i)
			}
		}
		if r := c.Handle(t.Context(), "old-3", nothing); r.Status != consumer.Done || r.Duplicate {
			t.Errorf("old-3: %+v", r)
		}
		if _, err := p.Purge(t.Context(), 0); !errors.Is(err, consumer.ErrConfig) {
			t.Errorf("limit 0: %v", err)
		}
	})
}

// Several nodes purge at once: each row once, and nobody waits or fails.
func TestPurgeOnSeveralNodes(t *testing.T) {
	over(t, inboxKinds, func(t *testing.T, f *fixture) {
		ids := make([]string, 200)
		for i := range ids {
			ids[i] = fmt.Sprint(i)
		}
		for _, r := range consumer.HandleBatch(t.Context(), f.consumer("g"), ids, func(context.Context, int) error { return nil }) {
			wantStatus(t, r, consumer.Done)
		}
		f.age(t, "%")
		var nodes sync.WaitGroup
		counts := make([]int, 4)
		for i := range counts {
			nodes.Go(func() {
				for {
					n, err := f.consumer("g").(purger).Purge(t.Context(), 20)
					counts[i] += n
					if err != nil {
						t.Error(err)
					}
					if n == 0 || err != nil {
						return
					}
				}
			})
		}
		nodes.Wait()
		total := 0
		for _, n := range counts {
			total += n
		}
		if total != len(ids) {
			t.Errorf("removed %d rows, want %d", total, len(ids))
		}
	})
}

// Every node migrates when it starts.
func TestMigrateAgainAndAtOnce(t *testing.T) {
	over(t, inboxKinds, func(t *testing.T, f *fixture) {
		_, err := f.db.Exec(`DROP TABLE ` + f.table)
		must(t, err)
		var nodes sync.WaitGroup
		for range 4 {
			nodes.Go(func() {
				if err := f.consumer("g").(purger).Migrate(t.Context()); err != nil {
					t.Error(err)
				}
			})
		}
		nodes.Wait()
		wantStatus(t, f.consumer("g").Handle(t.Context(), "e1", nothing), consumer.Done)
		must(t, f.consumer("g").(purger).Migrate(t.Context()))
		if r := f.consumer("g").Handle(t.Context(), "e1", nothing); !r.Duplicate {
			t.Error("Migrate lost a mark")
		}
	})
}
