package faults

import (
	"encoding/json"
	"fmt"
	"sync"
)

// event is one answer that a client got. Requests that got none leave no
// event: nothing is known of them.
type event struct {
	tenant, key string
	request     effectRequest
	answer      answer
}

// history is all that clients saw.
type history struct {
	mu     sync.Mutex
	events []event
}

func (h *history) add(e event) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.events = append(h.events, e)
}

type operationKey struct{ tenant, key string }

// violations checks a finished history and the ledger against the promises:
// at most one effect, an acknowledged effect is there, all answers of a key are
// one, one request a key, and nobody gets another's answer.
func (h *history) violations(effects map[string]int) []string {
	h.mu.Lock()
	defer h.mu.Unlock()
	var bad []string
	report := func(format string, args ...any) { bad = append(bad, fmt.Sprintf(format, args...)) }

	for op, n := range effects {
		if n > 1 {
			report("%s had %d effects", op, n)
		}
	}
	accepted := map[operationKey]event{}
	for _, e := range h.events {
		a := e.answer
		switch {
		case !a.definite() || a.Status == 422:
			continue
		case a.Status == 201:
			var got effectAnswer
			if err := json.Unmarshal([]byte(a.Body), &got); err != nil || got.Op != e.request.Op {
				report("%s asked for %q and was told %q", e.tenant, e.request.Op, a.Body)
			}
			if effects[e.request.Op] != 1 {
				report("%s was acknowledged and has %d effects", e.request.Op, effects[e.request.Op])
			}
		}
		k := operationKey{e.tenant, e.key}
		first, ok := accepted[k]
		if !ok {
			accepted[k] = e
			continue
		}
		if first.request != e.request {
			report("key %s was taken for %+v and for %+v", e.key, first.request, e.request)
		}
		if first.answer.Status != a.Status || first.answer.Body != a.Body || first.answer.Location != a.Location {
			report("key %s was answered %+v and %+v", e.key, first.answer, a)
		}
	}
	return bad
}
