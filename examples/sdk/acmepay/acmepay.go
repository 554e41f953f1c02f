// Package acmepay is a small SDK of a payment API, as its provider would ship
// it. Its users get safe retries without knowing how they work: no type of
// another module is in its interface, and Options is all that can be set.
package acmepay

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"time"

	"github.com/effectonce/idempotency"
)

// Options sets up a Client. APIKey alone is required.
type Options struct {
	APIKey     string
	BaseURL    string            // "": the live API
	MaxRetries int               // 0: three; negative: none
	Transport  http.RoundTripper // beneath the retries; nil: http.DefaultTransport
}

// Client calls the API. It is safe for concurrent use.
type Client struct {
	http    http.Client
	baseURL string
	apiKey  string
}

// New returns a Client.
func New(o Options) (*Client, error) {
	if o.APIKey == "" {
		return nil, errors.New("acmepay: Options.APIKey is empty")
	}
	attempts := 1 + o.MaxRetries
	switch {
	case o.MaxRetries == 0:
		attempts = idempotency.DefaultMaxAttempts
	case o.MaxRetries < 0:
		attempts = 1
	}
	if o.BaseURL == "" {
		o.BaseURL = "https://api.acmepay.example"
	}
	return &Client{
		baseURL: o.BaseURL,
		apiKey:  o.APIKey,
		http: http.Client{Transport: &idempotency.Transport{
			Base: o.Transport,
			Key:  idempotency.TimeOrderedKey, // our servers keep millions of them
			Retry: idempotency.RetryPolicy{
				MaxAttempts:    attempts,
				AttemptTimeout: 30 * time.Second,
				Budget:         &idempotency.Budget{}, // one for all calls of the Client
			},
		}},
	}, nil
}

// ChargeParams says what to charge. IdempotencyKey is for going on with a
// charge of which an [UnknownOutcome] told; normally it is empty.
type ChargeParams struct {
	Amount         int64  `json:"amount"`
	Currency       string `json:"currency"`
	IdempotencyKey string `json:"-"`
}

// Charge is a charge that was made.
type Charge struct {
	ID     string `json:"id"`
	Amount int64  `json:"amount"`
}

// APIError is an answer of the API that refuses a request. Nothing was done.
type APIError struct {
	Status  int
	Message string
}

func (e *APIError) Error() string { return fmt.Sprintf("acmepay: %d: %s", e.Status, e.Message) }

// UnknownOutcome says that no answer came, though the charge may have been
// made. Calling CreateCharge again with the key finds out, and makes it if not.
type UnknownOutcome struct {
	IdempotencyKey string
	Err            error
}

func (e *UnknownOutcome) Error() string { return "acmepay: outcome unknown: " + e.Err.Error() }
func (e *UnknownOutcome) Unwrap() error { return e.Err }

// CreateCharge makes a charge, once, however often it had to be asked for.
func (c *Client) CreateCharge(ctx context.Context, p ChargeParams) (*Charge, error) {
	body, err := json.Marshal(p)
	if err != nil {
		return nil, fmt.Errorf("acmepay: %w", err)
	}
	if p.IdempotencyKey != "" {
		ctx = idempotency.WithKey(ctx, p.IdempotencyKey)
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, c.baseURL+"/charges", bytes.NewReader(body))
	if err != nil {
		return nil, fmt.Errorf("acmepay: %w", err)
	}
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("Authorization", "Bearer "+c.apiKey)
	resp, err := c.http.Do(req)
	var lost *idempotency.Error
	switch {
	case errors.As(err, &lost) && lost.Ambiguous:
		return nil, &UnknownOutcome{IdempotencyKey: lost.Key, Err: err}
	case err != nil:
		return nil, fmt.Errorf("acmepay: %w", err)
	}
	defer resp.Body.Close()
	if resp.StatusCode >= 300 {
		message, _ := io.ReadAll(io.LimitReader(resp.Body, 1024))
		refusal := &APIError{Status: resp.StatusCode, Message: string(message)}
		if resp.StatusCode >= 500 && resp.Header.Get("Idempotent-Replayed") == "" {
			// The API failed, perhaps half way, and has not settled on that answer.
			// The key is in the request that was sent.
			return nil, &UnknownOutcome{IdempotencyKey: resp.Request.Header.Get("Idempotency-Key"), Err: refusal}
		}
		return nil, refusal
	}
	var charge Charge
	if err := json.NewDecoder(resp.Body).Decode(&charge); err != nil {
		return nil, fmt.Errorf("acmepay: the answer: %w", err)
	}
	return &charge, nil
}
