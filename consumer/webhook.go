package consumer

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"strconv"
	"time"
)

// DefaultMaxBody is how many bytes of body a [Webhook] takes.
const DefaultMaxBody = 1 << 20

// Webhook is an http.Handler that receives events and handles each once.
// Consumer, Verify, ID and Handle are required; where one is missing, every
// request is answered 500 and the log says why.
//
// It answers so that senders do the right thing, who take 2xx for received and
// send again after anything else:
//
//   - processed, now or earlier: 204
//   - being processed, or the store could not be asked: 503 with Retry-After
//   - the handler failed: 500
//   - poison: 204 once DeadLetter has taken it, else 500
//   - not a POST: 405; body too large: 413; Verify refuses: 403; no id: 400
type Webhook struct {
	Consumer Consumer

	// Verify checks the sender's signature over the body as received. [Unverified]
	// says out loud that there is none.
	Verify func(r *http.Request, body []byte) error

	// ID finds the event's id, such as [StandardWebhooksID]. It is called after
	// Verify.
	ID IDFunc

	// Handle does the work of one event; see [Handler]. r's headers are all
	// that the sender sent, trace context included; its body has been read.
	Handle func(ctx context.Context, r *http.Request, body []byte) error

	// DeadLetter keeps an event that is [Poison]. It returns nil once that is
	// durable, and may be called again for the same event.
	DeadLetter func(ctx context.Context, r *http.Request, body []byte, res Result) error

	// MaxBody is the most bytes that a body may have (1 MiB if 0).
	MaxBody int64

	// Respond writes the answer instead, where a sender wants a certain one.
	// It is not called for requests that were refused before they were handled.
	Respond func(w http.ResponseWriter, r *http.Request, res Result)

	// Logger gets a line for each event that was not done; nil for none.
	Logger *slog.Logger
}

// Unverified is a [Webhook.Verify] that accepts whatever comes. Only for where
// something else has checked the sender: anybody who can reach the handler can
// otherwise make it act.
func Unverified(*http.Request, []byte) error { return nil }

// ServeHTTP implements http.Handler.
func (h *Webhook) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if err := h.check(); err != nil {
		h.log(r.Context(), slog.LevelError, "webhook is not set up", "", err)
		http.Error(w, http.StatusText(http.StatusInternalServerError), http.StatusInternalServerError)
		return
	}
	if r.Method != http.MethodPost {
		w.Header().Set("Allow", http.MethodPost)
		http.Error(w, "events are sent by POST", http.StatusMethodNotAllowed)
		return
	}
	most := h.MaxBody
	if most == 0 {
		most = DefaultMaxBody
	}
	body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, most))
	if err != nil {
		code := http.StatusBadRequest
		var tooLarge *http.MaxBytesError
		if errors.As(err, &tooLarge) {
			code = http.StatusRequestEntityTooLarge
		}
		http.Error(w, "the body can't be read", code)
		return
	}
	// For a Verify that takes the request alone.
	r.Body = io.NopCloser(bytes.NewReader(body))
	if err := h.Verify(r, body); err != nil {
		h.log(r.Context(), slog.LevelWarn, "event refused", "", err)
		http.Error(w, "the signature is not valid", http.StatusForbidden)
		return
	}
	id, err := h.ID(r.Header, body)
	if err == nil && id == "" {
		err = ErrNoID
	}
	if err != nil {
		h.log(r.Context(), slog.LevelWarn, "event refused", "", err)
		http.Error(w, "the event has no id", http.StatusBadRequest)
		return
	}
	res := h.Consumer.Handle(r.Context(), id, func(ctx context.Context) error {
		return h.Handle(ctx, r.WithContext(ctx), body)
	})
	var deadLetter func(context.Context, Result) error
	if h.DeadLetter != nil {
		deadLetter = func(ctx context.Context, res Result) error { return h.DeadLetter(ctx, r, body, res) }
	}
	res = bury(r.Context(), res, deadLetter)
	if res.Status != Done {
		h.log(r.Context(), slog.LevelWarn, "event not processed: "+res.Status.String(), id, res.Err)
	}
	if h.Respond != nil {
		h.Respond(w, r, res)
		return
	}
	respond(w, res)
}

func respond(w http.ResponseWriter, res Result) {
	switch res.Status {
	case Done, Poison:
		w.WriteHeader(http.StatusNoContent)
	case Busy:
		seconds := max(1, int64((res.RetryAfter+time.Second-1)/time.Second))
		w.Header().Set("Retry-After", strconv.FormatInt(seconds, 10))
		http.Error(w, "the event is being processed", http.StatusServiceUnavailable)
	default:
		http.Error(w, "the event was not processed", http.StatusInternalServerError)
	}
}

func (h *Webhook) check() error {
	switch {
	case h.Consumer == nil:
		return fmt.Errorf("%w: Consumer is nil", ErrConfig)
	case h.Verify == nil:
		return fmt.Errorf("%w: Verify is nil; Unverified if that is meant", ErrConfig)
	case h.ID == nil:
		return fmt.Errorf("%w: ID is nil", ErrConfig)
	case h.Handle == nil:
		return fmt.Errorf("%w: Handle is nil", ErrConfig)
	case h.MaxBody < 0:
		return fmt.Errorf("%w: MaxBody must not be negative", ErrConfig)
	}
	return nil
}

func (h *Webhook) log(ctx context.Context, level slog.Level, msg, id string, err error) {
	if h.Logger == nil {
		return
	}
	h.Logger.LogAttrs(ctx, level, "consumer: "+msg, slog.String("event", id), slog.Any("err", err))
}
