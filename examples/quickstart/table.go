package main

import (
	"fmt"
	"io"
	"os"
	"strings"
)

// progress shows how far a campaign has come: a line that rewrites itself on a
// terminal, a line per quarter elsewhere.
type progress struct {
	out      io.Writer
	terminal bool
	title    string
	total    int
	shown    int
}

func newProgress(out io.Writer, title string, total int) *progress {
	p := &progress{out: out, title: title, total: total, shown: -1}
	if f, ok := out.(*os.File); ok {
		info, err := f.Stat()
		p.terminal = err == nil && info.Mode()&os.ModeCharDevice != 0
	}
	return p
}

func (p *progress) show(done int, n *network) {
	line := fmt.Sprintf("%-13s %4d/%d charged, %d attempts on the wire", p.title, done, p.total, n.attempts.Load())
	switch quarter := 4 * done / p.total; {
	case p.terminal:
		bar := strings.Repeat("#", 20*done/p.total)
		fmt.Fprintf(p.out, "\r[%-20s] %s", bar, line)
		if done == p.total {
			fmt.Fprintln(p.out)
		}
	case quarter != p.shown:
		p.shown = quarter
		fmt.Fprintln(p.out, line)
	}
}

func printTable(out io.Writer, runs []*campaign) {
	row := func(name string, value func(*campaign) any) {
		fmt.Fprintf(out, "%-32s", name)
		for _, c := range runs {
			fmt.Fprintf(out, "%15v", value(c))
		}
		fmt.Fprintln(out)
	}
	fmt.Fprintln(out)
	row("", func(c *campaign) any { return c.title })
	row("operations", func(c *campaign) any { return c.total })
	row("attempts on the wire", func(c *campaign) any { return c.net.attempts.Load() })
	row("  requests lost", func(c *campaign) any { return c.net.droppedRequests.Load() })
	row("  answers lost after the effect", func(c *campaign) any { return c.net.droppedAnswers.Load() })
	row("  answers cut half way", func(c *campaign) any { return c.net.cutBodies.Load() })
	row("  requests that arrived twice", func(c *campaign) any { return c.net.duplications.Load() })
	row("replays of a stored answer", func(c *campaign) any { return c.net.replays.Load() })
	row("409 while still in progress", func(c *campaign) any { return c.net.answers409.Load() })
	row("charged by an earlier run", func(c *campaign) any { return c.earlier })
	row("effects in the ledger", func(c *campaign) any { return c.effects })
	row("double charges", func(c *campaign) any { return c.doubles() })
	row("lost charges", func(c *campaign) any { return c.lost() })
}
