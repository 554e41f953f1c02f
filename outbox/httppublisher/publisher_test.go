package httppublisher_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/effectonce/idempotency"
	"github.com/effectonce/idempotency/outbox"
	"github.com/effectonce/idempotency/outbox/httppublisher"
	"github.com/effectonce/idempotency/outbox/outboxtest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// quick is a client that waits for nothing between its attempts.
func quick(base http.RoundTripper, attempts int) *http.Client {
	return &http.Client{Transport: &idempotency.Transport{Base: base,
		Retry: idempotency.RetryPolicy{MaxAttempts: attempts, MinWait: time.Microsecond, MaxWait: time.Microsecond}}}
}

func serve(t *testing.T, h http.HandlerFunc) *httptest.Server {
	srv := httptest.NewServer(h)
	t.Cleanup(srv.Close)
	return srv
}

func TestRequest(t *testing.T) {
	t.Parallel()
	var got *http.Request
	var body []byte
	srv := serve(t, func(_ http.ResponseWriter, r *http.Request) {
		got = r
		body, _ = io.ReadAll(r.Body)
	})
	p := &httppublisher.Publisher{
		Client: quick(srv.Client().Transport, 1),
		URL:    func(m outbox.Message) (string, error) { return srv.URL + "/" + m.Topic, nil },
		Prepare: func(r *http.Request, m outbox.Message) error {
			r.Header.Set("Webhook-Signature", "v1,"+m.ID)
			return nil
		},
	}
	m := outbox.Message{ID: "msg_1", Topic: "orders", Payload: []byte(`{"n":1}`),
		Header: map[string]string{"traceparent": "00-1-2-01", "idempotency-key": "another"}}
	if errs := p.Publish(t.Context(), []outbox.Message{m}); errs[0] != nil {
		t.Fatal(errs[0])
	}
	want := map[string]string{"Idempotency-Key": "msg_1", "Traceparent": "00-1-2-01", "Content-Type": "application/json", "Webhook-Signature": "v1,msg_1"}
	for k, v := range want {
		if h := got.Header.Values(k); !slices.Equal(h, []string{v}) {
			t.Errorf("%s is %q, want %q", k, h, v)
		}
	}
	if got.Method != "POST" || got.URL.Path != "/orders" || string(body) != `{"n":1}` {
		t.Errorf("%s %s with %s", got.Method, got.URL, body)
	}
}

func TestStatuses(t *testing.T) {
	t.Parallel()
	other := errors.New("neither")
	for _, tt := range []struct {
		code   int
		header string // a Retry-After
		want   error
	}{
		{200, "", nil}, {204, "", nil},
		{301, "", other}, {308, "", other}, // without a Location
		{400, "", outbox.ErrPermanent}, {404, "", outbox.ErrPermanent}, {410, "", outbox.ErrPermanent}, {413, "", outbox.ErrPermanent}, {422, "", outbox.ErrPermanent},
		{401, "", other}, {403, "", other}, {408, "", other}, {425, "", other},
		{409, "", outbox.ErrPermanent}, {409, "0", outbox.ErrUnreachable},
		{429, "", outbox.ErrUnreachable}, {502, "", outbox.ErrUnreachable}, {503, "0", outbox.ErrUnreachable}, {504, "", outbox.ErrUnreachable},
		{500, "", other}, {501, "", other},
	} {
		t.Run(fmt.Sprint(tt.code, tt.header), func(t *testing.T) {
			t.Parallel()
			srv := serve(t, func(w http.ResponseWriter, _ *http.Request) {
				if tt.header != "" {
					w.Header().Set("Retry-After", tt.header)
				}
				w.WriteHeader(tt.code)
			})
			p := &httppublisher.Publisher{Client: quick(srv.Client().Transport, 1), Timeout: 5 * time.Second}
			if tt.code == 409 {
				p.Timeout = 50 * time.Millisecond // "in progress" is waited out, up to that
			}
			err := p.Publish(t.Context(), []outbox.Message{{ID: "1", Topic: srv.URL}})[0]
			switch {
			case tt.want == nil && err != nil, tt.want != nil && err == nil:
				t.Fatalf("got %v, want %v", err, tt.want)
			case tt.want == other:
				if errors.Is(err, outbox.ErrPermanent) || errors.Is(err, outbox.ErrUnreachable) {
					t.Errorf("got %v", err)
				}
			case !errors.Is(err, tt.want):
				t.Errorf("got %v, want %v", err, tt.want)
			}
			var status *httppublisher.StatusError
			if err != nil && (!errors.As(err, &status) || status.Code != tt.code) {
				t.Errorf("got %v, want a StatusError of %d", err, tt.code)
			}
		})
	}
}

// By default a redirect is not followed: what is signed for one must not go to
// another.
func TestRedirectIsNotFollowed(t *testing.T) {
	var elsewhere bool
	other := serve(t, func(http.ResponseWriter, *http.Request) { elsewhere = true })
	srv := serve(t, func(w http.ResponseWriter, r *http.Request) {
		http.Redirect(w, r, other.URL, http.StatusTemporaryRedirect)
	})
	err := new(httppublisher.Publisher).Publish(t.Context(), []outbox.Message{{ID: "1", Topic: srv.URL}})[0]
	var status *httppublisher.StatusError
	if !errors.As(err, &status) || status.Code != 307 || elsewhere {
		t.Errorf("got %v; followed: %t", err, elsewhere)
	}
	http.DefaultTransport.(*http.Transport).CloseIdleConnections()
}

func TestUnreachable(t *testing.T) {
	t.Parallel()
	srv := httptest.NewServer(nil)
	srv.Close()
	p := &httppublisher.Publisher{Client: quick(&http.Transport{}, 2)}
	errs := p.Publish(t.Context(), []outbox.Message{{ID: "1", Topic: srv.URL}, {ID: "2", Topic: "no url"}, {ID: "3", Topic: "ftp://x/"}})
	if !errors.Is(errs[0], outbox.ErrUnreachable) || !errors.Is(errs[1], outbox.ErrPermanent) || !errors.Is(errs[2], outbox.ErrPermanent) {
		t.Errorf("got %v", errs)
	}
}

// Results are by position, whichever comes back first, and no more requests are
// under way than are allowed.
func TestPositionalAndBounded(t *testing.T) {
	t.Parallel()
	var mu sync.Mutex
	under, most := 0, 0
	gate := make(chan struct{})
	srv := serve(t, func(w http.ResponseWriter, r *http.Request) {
		mu.Lock()
		under++
		most = max(most, under)
		if under == 3 {
			close(gate)
		}
		mu.Unlock()
		<-gate // all three that are allowed have come
		mu.Lock()
		under--
		mu.Unlock()
		if r.URL.Path == "/bad" {
			w.WriteHeader(http.StatusUnprocessableEntity)
		}
	})
	p := &httppublisher.Publisher{Client: quick(srv.Client().Transport, 1), Parallel: 3}
	var msgs []outbox.Message
	for i := range 20 {
		path := "/good"
		if i%3 == 0 {
			path = "/bad"
		}
		msgs = append(msgs, outbox.Message{ID: fmt.Sprint(i), Topic: srv.URL + path})
	}
	for i, err := range p.Publish(t.Context(), msgs) {
		if (err != nil) != (i%3 == 0) {
			t.Errorf("message %d: %v", i, err)
		}
	}
	if most != 3 {
		t.Errorf("%d requests at once, want 3", most)
	}
}

// A message whose answer was lost is sent again, by the transport and then by
// the relay, always under its id.
func TestOneKeyThroughRetriesAndRelays(t *testing.T) {
	t.Parallel()
	var mu sync.Mutex
	var keys []string
	done := make(chan struct{})
	srv := serve(t, func(w http.ResponseWriter, r *http.Request) {
		mu.Lock()
		defer mu.Unlock()
		keys = append(keys, r.Header.Get("Idempotency-Key"))
		switch n := len(keys); {
		case n < 5:
			w.WriteHeader(http.StatusServiceUnavailable)
		case n == 5:
			close(done)
		}
	})
	store := new(outboxtest.Memory)
	if err := store.Enqueue(t.Context(), outbox.Message{ID: "order-1", Topic: srv.URL}); err != nil {
		t.Fatal(err)
	}
	relay, err := outbox.New(store, &httppublisher.Publisher{Client: quick(srv.Client().Transport, 2)}, outbox.Options{Unreachable: time.Millisecond, Poll: time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() { defer close(ended); _ = relay.Run(ctx) }()
	<-done
	cancel()
	<-ended
	if !slices.Equal(keys, slices.Repeat([]string{"order-1"}, 5)) || store.Pending() != 0 {
		t.Errorf("keys %q, %d left", keys, store.Pending())
	}
}
