// Package bench times the parts of the module beside their floors.
package bench

import (
	"bytes"
	"encoding/hex"
	"io"
	"net/http"
	"net/url"
	"strconv"
	"testing"

	"github.com/gofiber/fiber/v2"
	fiberidempotency "github.com/gofiber/fiber/v2/middleware/idempotency"
	"github.com/valyala/fasthttp"

	"github.com/effectonce/idempotency/dedup/memstore"
	"github.com/effectonce/idempotency/server"
)

// BenchmarkServer times one request, without a network, through
//   - bare: the handler alone, the floor;
//   - first: the guard on a memory store, with a new key each time;
//   - replay: the same, with one key;
//   - fiber-*: the same three with fiber's idempotency middleware, the one peer
//     that is a Go module. It has no fingerprint, so no 422.
func BenchmarkServer(b *testing.B) {
	for _, size := range []int{100, 1024} {
		body := payload(size)
		name := strconv.Itoa(size) + "B/"
		guarded := func() http.Handler {
			return server.New(memstore.New(), server.Options{Scope: server.SingleTenant}).Handler(http.HandlerFunc(charge))
		}
		b.Run(name+"bare", func(b *testing.B) { benchHTTP(b, http.HandlerFunc(charge), body, newKey) })
		b.Run(name+"first", func(b *testing.B) { benchHTTP(b, guarded(), body, newKey) })
		b.Run(name+"replay", func(b *testing.B) { benchHTTP(b, guarded(), body, sameKey) })

		app := func(guard bool) fasthttp.RequestHandler {
			app := fiber.New()
			if guard {
				app.Use(fiberidempotency.New())
			}
			app.Post("/charges", func(c *fiber.Ctx) error {
				if len(c.Body()) == 0 {
					return fiber.ErrBadRequest
				}
				c.Set("Content-Type", "application/json")
				c.Set("Location", "/charges/1")
				return c.Status(201).SendString(answer)
			})
			return app.Handler()
		}
		b.Run(name+"fiber-bare", func(b *testing.B) { benchFiber(b, app(false), body, newKey) })
		b.Run(name+"fiber-first", func(b *testing.B) { benchFiber(b, app(true), body, newKey) })
		b.Run(name+"fiber-replay", func(b *testing.B) { benchFiber(b, app(true), body, sameKey) })
	}
}

const answer = `{"id":"ch_1","status":"succeeded"}`

func charge(w http.ResponseWriter, r *http.Request) {
	if n, err := io.Copy(io.Discard, r.Body); err != nil || n == 0 {
		http.Error(w, "no body", http.StatusBadRequest)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Location", "/charges/1")
	w.WriteHeader(http.StatusCreated)
	_, _ = io.WriteString(w, answer)
}

// payload returns a JSON object of size bytes, as a client of a payment service
// may send it: some fields, and line items.
func payload(size int) []byte {
	b := []byte(`{"currency":"EUR","amount":1999,"customer":"cus_81723","capture":true`)
	for i := 0; len(b) < size-120; i++ {
		if i == 0 {
			b = append(b, `,"items":[`...)
		} else {
			b = append(b, ',')
		}
		b = append(b, `{"sku":"ticket-`+strconv.Itoa(i)+`","quantity":2,"unit_price":995,"name":"Ticket"}`...)
	}
	if bytes.Contains(b, []byte("items")) {
		b = append(b, ']')
	}
	b = append(b, `,"note":"`...)
	b = append(b, bytes.Repeat([]byte("x"), size-len(b)-2)...)
	return append(b, `"}`...)
}

// newKey and sameKey write the key of the i-th request, a UUID by its looks.
func newKey(dst []byte, i int) {
	var n [4]byte
	n[0], n[1], n[2], n[3] = byte(i>>24), byte(i>>16), byte(i>>8), byte(i)
	hex.Encode(dst, n[:])
}

func sameKey([]byte, int) {}

func benchHTTP(b *testing.B, h http.Handler, body []byte, setKey func([]byte, int)) {
	key := []byte("00000000-aaaa-4bbb-8ccc-1234567890ab")
	r := &http.Request{
		Method: "POST", URL: &url.URL{Path: "/charges"}, RequestURI: "/charges", Pattern: "POST /charges",
		Header:        http.Header{"Content-Type": {"application/json"}, "Idempotency-Key": {""}},
		ContentLength: int64(len(body)),
	}
	in := new(reader)
	w := &writer{header: make(http.Header)}
	i := 0
	b.ReportAllocs()
	defer cpuTime(b)()
	for b.Loop() {
		setKey(key[:8], i)
		i++
		r.Header["Idempotency-Key"][0] = string(key)
		in.Reset(body)
		r.Body = in
		clear(w.header)
		w.status, w.n = 0, 0
		h.ServeHTTP(w, r)
		if w.status != 201 || w.n != len(answer) {
			b.Fatalf("answer %d of %d bytes", w.status, w.n)
		}
	}
}

type reader struct{ bytes.Reader }

func (*reader) Close() error { return nil }

// writer is an http.ResponseWriter that costs nothing.
type writer struct {
	header    http.Header
	status, n int
}

func (w *writer) Header() http.Header    { return w.header }
func (w *writer) WriteHeader(status int) { w.status = status }
func (w *writer) Write(p []byte) (int, error) {
	w.n += len(p)
	return len(p), nil
}

func benchFiber(b *testing.B, h fasthttp.RequestHandler, body []byte, setKey func([]byte, int)) {
	key := []byte("00000000-aaaa-4bbb-8ccc-1234567890ab")
	var ctx fasthttp.RequestCtx
	ctx.Request.Header.SetMethod("POST")
	ctx.Request.SetRequestURI("/charges")
	ctx.Request.Header.SetContentType("application/json")
	ctx.Request.SetBody(body)
	i := 0
	b.ReportAllocs()
	defer cpuTime(b)()
	for b.Loop() {
		setKey(key[:8], i)
		i++
		ctx.Request.Header.SetBytesV("X-Idempotency-Key", key)
		ctx.Response.Reset()
		h(&ctx)
		if ctx.Response.StatusCode() != 201 || len(ctx.Response.Body()) != len(answer) {
			b.Fatalf("answer %d %q", ctx.Response.StatusCode(), ctx.Response.Body())
		}
	}
}
