package faults

import (
	"context"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/Shopify/toxiproxy/v2"
	"github.com/rs/zerolog"
)

// badNetwork is a TCP proxy whose faults change at random.
type badNetwork struct {
	proxy *toxiproxy.Proxy
}

func newBadNetwork(t testing.TB, upstream string) *badNetwork {
	t.Helper()
	srv := toxiproxy.NewServer(toxiproxy.NewMetricsContainer(nil), zerolog.Nop())
	p := toxiproxy.NewProxy(srv, t.Name(), "127.0.0.1:0", upstream)
	if err := p.Start(); err != nil {
		t.Fatal(err)
	}
	n := &badNetwork{p}
	t.Cleanup(p.Stop)
	return n
}

func (n *badNetwork) addr() string { return n.proxy.Listen }

// faults that the network may have next; "" is none. Those that lose data do so
// downstream too, after the server has acted.
var networkFaults = []string{
	"", "",
	`{"type":"latency","stream":"downstream","attributes":{"latency":30,"jitter":30}}`,
	`{"type":"latency","stream":"upstream","attributes":{"latency":30,"jitter":30}}`,
	`{"type":"limit_data","stream":"downstream","attributes":{"bytes":%d}}`,
	`{"type":"limit_data","stream":"upstream","attributes":{"bytes":%d}}`,
	`{"type":"reset_peer","stream":"downstream","attributes":{"timeout":%d}}`,
	`{"type":"timeout","stream":"downstream","attributes":{"timeout":%d}}`,
	`{"type":"slicer","stream":"downstream","attributes":{"average_size":20,"size_variation":10,"delay":200}}`,
}

// change replaces the network's fault by another one.
func (n *badNetwork) change(t testing.TB, dice *rand.Rand) {
	n.heal()
	fault := networkFaults[dice.IntN(len(networkFaults))]
	if strings.Contains(fault, "%d") {
		fault = fmt.Sprintf(fault, 1+dice.IntN(400))
	}
	if fault == "" {
		return
	}
	if _, err := n.proxy.Toxics.AddToxicJson(strings.NewReader(fault)); err != nil {
		t.Errorf("toxiproxy: %s: %v", fault, err)
	}
}

func (n *badNetwork) heal() { n.proxy.Toxics.ResetToxics(context.Background()) }
