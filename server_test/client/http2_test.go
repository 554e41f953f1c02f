// Package client_test has the tests of the client that need more than the
// standard library.
package client_test

import (
	"bytes"
	"errors"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"
	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"

	"github.com/effectonce/idempotency"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// stream is one request as an h2Server sees it.
type stream struct {
	framer *http2.Framer
	id     uint32
	number int // of the request, over all connections, from 1
}

// answer sends a whole response.
func (s stream) answer(status, body string) {
	s.header(status)
	_ = s.framer.WriteData(s.id, true, []byte(body))
}

// header sends a response's header alone.
func (s stream) header(status string) {
	var block bytes.Buffer
	_ = hpack.NewEncoder(&block).WriteField(hpack.HeaderField{Name: ":status", Value: status})
	_ = s.framer.WriteHeaders(http2.HeadersFrameParam{StreamID: s.id, BlockFragment: block.Bytes(), EndHeaders: true})
}

// h2Server speaks HTTP/2 frame by frame, to do what net/http's own server does
// only under load or when it stops.
type h2Server struct {
	url string
	// serve answers a request that was read whole. The connection is closed
	// when it returns false.
	serve func(stream) bool

	mu     sync.Mutex
	keys   []string
	bodies []string
}

func startH2(t *testing.T, serve func(stream) bool) *h2Server {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s := &h2Server{url: "http://" + ln.Addr().String(), serve: serve}
	var conns sync.WaitGroup
	conns.Go(func() {
		for {
			conn, err := ln.Accept()
			if err != nil {
				return
			}
			conns.Go(func() {
				defer conn.Close()
				s.handle(conn)
			})
		}
	})
	t.Cleanup(func() {
		ln.Close()
		conns.Wait()
	})
	return s
}

func (s *h2Server) handle(conn net.Conn) {
	if _, err := io.ReadFull(conn, make([]byte, len(http2.ClientPreface))); err != nil {
		return
	}
	framer := http2.NewFramer(conn, conn)
	framer.ReadMetaHeaders = hpack.NewDecoder(4096, nil)
	if framer.WriteSettings() != nil {
		return
	}
	keys, bodies := map[uint32]string{}, map[uint32]string{}
	for {
		frame, err := framer.ReadFrame()
		if err != nil {
			return
		}
		ended := false
		switch f := frame.(type) {
		case *http2.SettingsFrame:
			if !f.IsAck() {
				_ = framer.WriteSettingsAck()
			}
		case *http2.MetaHeadersFrame:
			for _, field := range f.RegularFields() {
				if field.Name == "idempotency-key" {
					keys[f.StreamID] = field.Value
				}
			}
			ended = f.StreamEnded()
		case *http2.DataFrame:
			bodies[f.StreamID] += string(f.Data())
			ended = f.StreamEnded()
		}
		if !ended {
			continue
		}
		id := frame.Header().StreamID
		s.mu.Lock()
		s.keys, s.bodies = append(s.keys, keys[id]), append(s.bodies, bodies[id])
		n := len(s.keys)
		s.mu.Unlock()
		if !s.serve(stream{framer, id, n}) {
			return
		}
	}
}

// check says whether all of want requests had one key and the body.
func (s *h2Server) check(t *testing.T, want int, body string) {
	t.Helper()
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.keys) != want {
		t.Fatalf("the server got %d requests, want %d", len(s.keys), want)
	}
	for i := range s.keys {
		if s.keys[i] == "" || s.keys[i] != s.keys[0] || s.bodies[i] != body {
			t.Errorf("request %d: key %q (the first's is %q), body %q", i+1, s.keys[i], s.keys[0], s.bodies[i])
		}
	}
}

// h2Transport sends over HTTP/2 without TLS.
func h2Transport(t *testing.T) *idempotency.Transport {
	t.Helper()
	base := &http.Transport{Protocols: new(http.Protocols)}
	base.Protocols.SetUnencryptedHTTP2(true)
	t.Cleanup(base.CloseIdleConnections)
	return &idempotency.Transport{
		Base:  base,
		Retry: idempotency.RetryPolicy{MinWait: time.Millisecond, MaxWait: 2 * time.Millisecond},
	}
}

func TestHTTP2LossesAreRetriedWithTheKey(t *testing.T) {
	t.Parallel()
	tests := map[string]func(stream) bool{
		// Nothing was done: net/http sends again by itself, given GetBody.
		"REFUSED_STREAM": func(s stream) bool {
			_ = s.framer.WriteRSTStream(s.id, http2.ErrCodeRefusedStream)
			return true
		},
		"GOAWAY before the request": func(s stream) bool {
			_ = s.framer.WriteGoAway(0, http2.ErrCodeNo, nil)
			return false
		},
		// It may have been done: only the key makes it safe to send again.
		"GOAWAY after the request": func(s stream) bool {
			_ = s.framer.WriteGoAway(s.id, http2.ErrCodeNo, nil)
			return false
		},
		"GOAWAY with an error": func(s stream) bool {
			_ = s.framer.WriteGoAway(s.id, http2.ErrCodeEnhanceYourCalm, []byte("calm down"))
			return false
		},
		"INTERNAL_ERROR": func(s stream) bool {
			_ = s.framer.WriteRSTStream(s.id, http2.ErrCodeInternal)
			return true
		},
		"connection closed": func(stream) bool { return false },
		"reset in the middle of the answer": func(s stream) bool {
			s.header("201")
			_ = s.framer.WriteData(s.id, false, []byte("half"))
			_ = s.framer.WriteRSTStream(s.id, http2.ErrCodeInternal)
			return true
		},
		"closed in the middle of the answer": func(s stream) bool {
			s.header("201")
			_ = s.framer.WriteData(s.id, false, []byte("half"))
			return false
		},
	}
	bodies := map[string]func() io.Reader{
		"GetBody":  func() io.Reader { return strings.NewReader("charge") },
		"buffered": func() io.Reader { return io.MultiReader(strings.NewReader("charge")) },
	}
	for name, lose := range tests {
		for kind, body := range bodies {
			t.Run(name+"/"+kind, func(t *testing.T) {
				t.Parallel()
				srv := startH2(t, func(s stream) bool {
					if s.number == 1 {
						return lose(s)
					}
					s.answer("201", "done")
					return true
				})
				client := &http.Client{Transport: h2Transport(t)}
				resp, err := client.Post(srv.url, "text/plain", body())
				if err != nil {
					t.Fatal(err)
				}
				got, err := io.ReadAll(resp.Body)
				resp.Body.Close()
				if err != nil || string(got) != "done" || resp.StatusCode != 201 {
					t.Errorf("answer %d %q, %v", resp.StatusCode, got, err)
				}
				srv.check(t, 2, "charge")
			})
		}
	}
}

// refused returns net/http's own error of a refused stream, which has no
// exported type. It is had from a stream that is refused in its answer, since
// net/http sends again what is refused before.
func refused(t *testing.T) error {
	t.Helper()
	srv := startH2(t, func(s stream) bool {
		s.header("200")
		_ = s.framer.WriteRSTStream(s.id, http2.ErrCodeRefusedStream)
		return true
	})
	resp, err := h2Transport(t).Base.RoundTrip(newPost(t, srv.url, ""))
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if _, err = io.ReadAll(resp.Body); err == nil {
		t.Fatal("the stream was not refused")
	}
	return err
}

// A refused stream was not processed (RFC 9113, section 8.7): the error is not
// ambiguous, and even a request without a key is sent again.
func TestHTTP2RefusedStreamWasNotProcessed(t *testing.T) {
	t.Parallel()
	err := refused(t)
	sent := 0
	tr := &idempotency.Transport{
		Base: roundTripper(func(*http.Request) (*http.Response, error) {
			sent++
			return nil, err
		}),
		Key:   func(*http.Request) (string, error) { return "", nil },
		Retry: idempotency.RetryPolicy{MaxAttempts: 3, MinWait: time.Millisecond, MaxWait: time.Millisecond},
	}
	_, err = tr.RoundTrip(newPost(t, "http://api.example.com", ""))
	var e *idempotency.Error
	if !errors.As(err, &e) || e.Ambiguous || sent != 3 {
		t.Errorf("RoundTrip: %v after %d attempts, want 3 and no ambiguity", err, sent)
	}
}

// A stream that answers and is refused then has been processed, whatever the
// code says.
func TestHTTP2RefusedAfterTheHeaderIsAmbiguous(t *testing.T) {
	t.Parallel()
	srv := startH2(t, func(s stream) bool {
		s.header("201")
		_ = s.framer.WriteRSTStream(s.id, http2.ErrCodeRefusedStream)
		return true
	})
	_, err := h2Transport(t).RoundTrip(newPost(t, srv.url, "charge"))
	var e *idempotency.Error
	if !errors.As(err, &e) || !e.Ambiguous {
		t.Errorf("RoundTrip: %v, want it to be ambiguous", err)
	}
}

type roundTripper func(*http.Request) (*http.Response, error)

func (f roundTripper) RoundTrip(req *http.Request) (*http.Response, error) { return f(req) }

func newPost(t *testing.T, url, body string) *http.Request {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, url, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	return req
}
