package bench

import (
	"bytes"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/PuerkitoBio/rehttp"
	"github.com/failsafe-go/failsafe-go/failsafehttp"
	"github.com/hashicorp/go-retryablehttp"

	"github.com/effectonce/idempotency"
)

// retryWait is each client's pause before a retry.
const retryWait = time.Millisecond

// clients are what goes around a base: nothing, which is the floor; our
// Transport, with and without reading the answer ahead, each time with a fresh
// key; and the peers, none of which makes a key.
func clients(base http.RoundTripper) []struct {
	name string
	rt   http.RoundTripper
} {
	policy := idempotency.RetryPolicy{MinWait: retryWait, MaxWait: retryWait}

	hashicorp := retryablehttp.NewClient()
	hashicorp.Logger = nil
	hashicorp.HTTPClient = &http.Client{Transport: base}
	hashicorp.RetryWaitMin, hashicorp.RetryWaitMax = retryWait, retryWait

	return []struct {
		name string
		rt   http.RoundTripper
	}{
		{"bare", base},
		{"ours", &idempotency.Transport{Base: base, Retry: policy, MaxBufferedResponse: -1}},
		{"ours-buffered", &idempotency.Transport{Base: base, Retry: policy}},
		{"go-retryablehttp", &retryablehttp.RoundTripper{Client: hashicorp}},
		{"rehttp", rehttp.NewTransport(base,
			rehttp.RetryAll(rehttp.RetryMaxRetries(3), rehttp.RetryAny(rehttp.RetryStatuses(503), rehttp.RetryTemporaryErr())),
			rehttp.ConstDelay(retryWait))},
		{"failsafe", failsafehttp.NewRoundTripper(base, failsafehttp.NewRetryPolicyBuilder().WithDelay(retryWait).Build())},
	}
}

// memory is a base without a network. It reads each request and answers it,
// after refusing the first refusals of an operation.
type memory struct {
	refusals int
	refused  int
}

var charged = strings.Repeat(`{"id":"ch_1"}`, 10)

func (m *memory) RoundTrip(req *http.Request) (*http.Response, error) {
	_, err := io.Copy(io.Discard, req.Body)
	_ = req.Body.Close()
	if err != nil {
		return nil, err
	}
	status := http.StatusCreated
	if m.refused < m.refusals {
		m.refused++
		status = http.StatusServiceUnavailable
	} else {
		m.refused = 0
	}
	return &http.Response{
		StatusCode: status, Proto: "HTTP/1.1", ProtoMajor: 1, ProtoMinor: 1,
		Header:        http.Header{"Content-Type": {"application/json"}},
		Body:          io.NopCloser(strings.NewReader(charged)),
		ContentLength: int64(len(charged)),
		Request:       req,
	}, nil
}

// BenchmarkClient times one operation over a base in memory, at once and with
// one retry, which has the same pause for all.
func BenchmarkClient(b *testing.B) {
	for _, size := range []int{1 << 10, 1 << 20} {
		for _, refusals := range []int{0, 1} {
			for _, c := range clients(&memory{refusals: refusals}) {
				if refusals > 0 && c.name == "bare" {
					continue
				}
				kind := []string{"success", "retry"}[refusals]
				b.Run(fmt.Sprintf("%dKiB/%s/%s", size>>10, kind, c.name), func(b *testing.B) {
					body := payload(size)
					b.ReportAllocs()
					for b.Loop() {
						send(b, c.rt, "http://bench.example/charges", body)
					}
				})
			}
		}
	}
}

// keyed is what a caller does who sets the header by hand: the least that a key
// costs on the wire, where client and server are one machine.
type keyed struct{ base http.RoundTripper }

func (k keyed) RoundTrip(req *http.Request) (*http.Response, error) {
	req.Header.Set("Idempotency-Key", "3c9ae5ea-980f-4ebd-a027-04529942b95e")
	return k.base.RoundTrip(req)
}

// BenchmarkClientLoopback compares requests over a real connection: the time of
// each, and its throughput as a part of the bare base's.
func BenchmarkClientLoopback(b *testing.B) {
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(http.StatusCreated)
		_, _ = io.WriteString(w, charged)
	}))
	defer srv.Close()
	base := http.DefaultTransport.(*http.Transport).Clone()
	defer base.CloseIdleConnections()
	body := payload(1 << 10)
	// In turns, so that what else the machine does hits all alike, and by the
	// median, so that it hits none much.
	all := clients(base)
	all = append(all, all[0])
	all[len(all)-1].name, all[len(all)-1].rt = "bare-with-key", keyed{base}
	const batch = 50
	times := make([][]float64, len(all))
	for b.Loop() {
		for i, c := range all {
			began := time.Now()
			for range batch {
				send(b, c.rt, srv.URL, body)
			}
			times[i] = append(times[i], float64(time.Since(began).Nanoseconds())/batch)
		}
	}
	b.ReportMetric(0, "ns/op") // of all together, which says nothing
	var bare float64
	for i, c := range all {
		slices.Sort(times[i])
		median := times[i][len(times[i])/2]
		if c.name == "bare" {
			bare = median
		}
		b.ReportMetric(median, c.name+"-ns/req")
		b.ReportMetric(bare/median, c.name+"-throughput")
	}
}

func send(b *testing.B, rt http.RoundTripper, url string, body []byte) {
	req, err := http.NewRequest(http.MethodPost, url, bytes.NewReader(body))
	if err != nil {
		b.Fatal(err)
	}
	resp, err := rt.RoundTrip(req)
	if err != nil {
		b.Fatal(err)
	}
	_, err = io.Copy(io.Discard, resp.Body)
	_ = resp.Body.Close()
	if err != nil || resp.StatusCode != http.StatusCreated {
		b.Fatalf("status %d, %v", resp.StatusCode, err)
	}
}
