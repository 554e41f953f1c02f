package main

import (
	"bytes"
	"hash/fnv"
	"io"
	"log"
	"math/rand/v2"
	"net/http"
	"strconv"
	"sync"
	"sync/atomic"
	"time"
)

// faults says how often the network does what, each from 0 to 1.
type faults struct {
	dropRequest float64 // the request never reaches the server
	dropAnswer  float64 // the server has done it, and nobody hears of it
	cutBody     float64 // the answer breaks off half way
	duplicate   float64 // the request arrives twice
	maxDelay    time.Duration
}

// network is a bad network between client and server: an HTTP proxy that loses,
// cuts, delays and duplicates. What happens to a request depends only on the
// seed, the request's body and how often that body was sent before, so that a
// seed gives the same faults whatever the order in which goroutines run.
type network struct {
	server string // base URL
	faults faults
	seed   uint64
	client *http.Client

	mu   sync.Mutex
	sent map[uint64]uint64 // how often each body was sent

	attempts, answers409, replays                            atomic.Int64
	droppedRequests, droppedAnswers, cutBodies, duplications atomic.Int64
}

func newNetwork(server string, f faults, seed uint64) *network {
	return &network{
		server: server, faults: f, seed: seed, sent: map[uint64]uint64{},
		// No keep-alive: a reused connection makes net/http repeat requests by
		// itself, and the faults here are to be the only ones.
		client: &http.Client{Transport: &http.Transport{DisableKeepAlives: true}},
	}
}

func (n *network) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(r.Body)
	if err != nil {
		panic(http.ErrAbortHandler)
	}
	n.attempts.Add(1)
	dice := n.dice(body)
	dropRequest := dice.Float64() < n.faults.dropRequest
	dropAnswer := dice.Float64() < n.faults.dropAnswer
	cut := dice.Float64() < n.faults.cutBody
	duplicate := dice.Float64() < n.faults.duplicate
	delay := time.Duration(dice.Float64() * float64(n.faults.maxDelay))

	time.Sleep(delay)
	if dropRequest {
		n.droppedRequests.Add(1)
		panic(http.ErrAbortHandler) // closes the connection without an answer
	}
	var copies sync.WaitGroup
	defer copies.Wait()
	if duplicate {
		n.duplications.Add(1)
		copies.Go(func() { _, _, _ = n.forward(r, body) })
	}
	resp, answer, err := n.forward(r, body)
	if err != nil || dropAnswer {
		n.droppedAnswers.Add(1)
		panic(http.ErrAbortHandler)
	}
	switch {
	case resp.StatusCode == http.StatusConflict:
		n.answers409.Add(1)
	case resp.Header.Get("Idempotent-Replayed") == "true":
		n.replays.Add(1)
	}
	for name, values := range resp.Header {
		w.Header()[name] = values
	}
	w.Header().Set("Content-Length", strconv.Itoa(len(answer)))
	w.WriteHeader(resp.StatusCode)
	if cut {
		n.cutBodies.Add(1)
		_, _ = w.Write(answer[:len(answer)/2])
		_ = http.NewResponseController(w).Flush()
		panic(http.ErrAbortHandler)
	}
	_, _ = w.Write(answer)
}

// forward takes the request to the server, whether or not the client waits.
func (n *network) forward(r *http.Request, body []byte) (*http.Response, []byte, error) {
	out, err := http.NewRequest(r.Method, n.server+r.URL.RequestURI(), bytes.NewReader(body))
	if err != nil {
		return nil, nil, err
	}
	out.Header = r.Header.Clone()
	resp, err := n.client.Do(out)
	if err != nil {
		return nil, nil, err
	}
	defer resp.Body.Close()
	answer, err := io.ReadAll(resp.Body)
	return resp, answer, err
}

// dice are the random numbers for the next sending of body.
func (n *network) dice(body []byte) *rand.Rand {
	h := fnv.New64a()
	h.Write(body)
	id := h.Sum64()
	n.mu.Lock()
	defer n.mu.Unlock()
	n.sent[id]++
	return rand.New(rand.NewPCG(n.seed^id, n.sent[id]))
}

// quiet is the log of a server whose handler drops connections on purpose.
func quiet() *log.Logger { return log.New(io.Discard, "", 0) }
