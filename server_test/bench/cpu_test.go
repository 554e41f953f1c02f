//go:build unix

package bench

import (
	"syscall"
	"testing"
	"time"
)

// cpuTime adds to b's results what an operation costs of all processors, the
// garbage collector's work included. Unlike the time that passes, it does not
// depend on what else the machine does meanwhile. Use it around the loop:
//
//	defer cpuTime(b)()
func cpuTime(b *testing.B) func() {
	before := usage(b)
	return func() {
		b.ReportMetric(float64(usage(b)-before)/float64(b.N), "cpu-ns/op")
	}
}

func usage(b *testing.B) time.Duration {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		b.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}
