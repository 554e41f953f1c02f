package main

import (
	"context"
	"os"
	"testing"
)

// The test's own program is the worker, too.
func TestMain(m *testing.M) {
	if s, ok := workerSettings(); ok {
		if err := work(context.Background(), s); err != nil {
			os.Stderr.WriteString(err.Error() + "\n")
		}
		os.Exit(1)
	}
	os.Exit(m.Run())
}

func TestKilledAgainAndAgain(t *testing.T) {
	t.Parallel()
	const orders = 100
	res, err := run(t.Context(), settings{orders: orders}, 1)
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("%+v", res)
	if res.orders != orders || res.shipped != orders || res.doubled != 0 || res.lost != 0 {
		t.Errorf("%d orders, %d shipments, %d twice, %d never; want %d, each once", res.orders, res.shipped, res.doubled, res.lost, orders)
	}
	if res.kills < 2 {
		t.Errorf("the worker was killed %d times", res.kills)
	}
}
