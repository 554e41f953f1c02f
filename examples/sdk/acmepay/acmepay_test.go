package acmepay_test

import (
	"errors"
	"io"
	"net/http"
	"testing"
	"testing/synctest"

	"github.com/jarcoal/httpmock"

	"github.com/effectonce/idempotency/examples/sdk/acmepay"
)

const chargesURL = "https://api.acmepay.example/charges"

// api answers one attempt after the other and keeps the keys it was asked with.
type api struct {
	*httpmock.MockTransport
	keys []string
}

func answering(t *testing.T, answers ...httpmock.Responder) *api {
	a := &api{MockTransport: httpmock.NewMockTransport()}
	a.RegisterResponder(http.MethodPost, chargesURL, func(req *http.Request) (*http.Response, error) {
		body, err := io.ReadAll(req.Body)
		if err != nil || string(body) != `{"amount":500,"currency":"EUR"}` {
			t.Errorf("body %s, %v", body, err)
		}
		a.keys = append(a.keys, req.Header.Get("Idempotency-Key"))
		return answers[min(len(a.keys), len(answers))-1](req)
	})
	return a
}

func (a *api) checkKeys(t *testing.T, n int) {
	t.Helper()
	if len(a.keys) != n {
		t.Fatalf("asked %d times, want %d", len(a.keys), n)
	}
	for _, k := range a.keys {
		if k == "" || k != a.keys[0] {
			t.Errorf("keys %q, want one", a.keys)
		}
	}
}

func newClient(t *testing.T, o acmepay.Options) *acmepay.Client {
	t.Helper()
	o.APIKey = "sk_test"
	c, err := acmepay.New(o)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

var (
	lost    = httpmock.NewErrorResponder(io.ErrUnexpectedEOF)
	busy    = httpmock.NewStringResponder(503, "busy")
	created = httpmock.NewStringResponder(201, `{"id":"ch_1","amount":500}`)
	params  = acmepay.ChargeParams{Amount: 500, Currency: "EUR"}
)

func TestChargeIsAskedForUnderOneKey(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		a := answering(t, lost, busy, created)
		charge, err := newClient(t, acmepay.Options{Transport: a}).CreateCharge(t.Context(), params)
		if err != nil || charge.ID != "ch_1" {
			t.Fatalf("CreateCharge = %+v, %v", charge, err)
		}
		a.checkKeys(t, 3)
	})
}

func TestUnknownOutcomeIsTakenUpAgain(t *testing.T) {
	t.Parallel()
	for name, fails := range map[string]httpmock.Responder{"lost": lost, "503": busy} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				a := answering(t, fails, fails, created)
				c := newClient(t, acmepay.Options{Transport: a, MaxRetries: 1})
				_, err := c.CreateCharge(t.Context(), params)
				var unknown *acmepay.UnknownOutcome
				if !errors.As(err, &unknown) {
					t.Fatalf("CreateCharge: %v", err)
				}
				again := params
				again.IdempotencyKey = unknown.IdempotencyKey
				charge, err := c.CreateCharge(t.Context(), again)
				if err != nil || charge.ID != "ch_1" {
					t.Fatalf("CreateCharge = %+v, %v", charge, err)
				}
				a.checkKeys(t, 3)
			})
		})
	}
}

func TestRefusalIsNotRetried(t *testing.T) {
	t.Parallel()
	a := answering(t, httpmock.NewStringResponder(402, "card declined"))
	_, err := newClient(t, acmepay.Options{Transport: a}).CreateCharge(t.Context(), params)
	var refused *acmepay.APIError
	var unknown *acmepay.UnknownOutcome
	if !errors.As(err, &refused) || refused.Status != 402 || refused.Message != "card declined" || errors.As(err, &unknown) {
		t.Errorf("CreateCharge: %v", err)
	}
	a.checkKeys(t, 1)
}

func TestRetriesCanBeSwitchedOff(t *testing.T) {
	t.Parallel()
	a := answering(t, lost, created)
	_, err := newClient(t, acmepay.Options{Transport: a, MaxRetries: -1}).CreateCharge(t.Context(), params)
	if !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Errorf("CreateCharge: %v", err)
	}
	a.checkKeys(t, 1)
}

func TestAPIKeyIsRequired(t *testing.T) {
	t.Parallel()
	if _, err := acmepay.New(acmepay.Options{}); err == nil {
		t.Error("no error")
	}
}
