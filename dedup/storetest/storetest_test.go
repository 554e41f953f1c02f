package storetest_test

import (
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/effectonce/idempotency/dedup"
	"github.com/effectonce/idempotency/dedup/storetest"
)

const faultVar = "STORETEST_FAULT"

// TestModel passes without a fault. TestFaultsAreCaught runs it with each one.
func TestModel(t *testing.T) {
	edit := func(s dedup.Store, k dedup.Key, f func(*row)) {
		m := s.(*model)
		m.mu.Lock()
		defer m.mu.Unlock()
		f(m.rows[m.key(k)])
	}
	storetest.Run(t, func(*testing.T) dedup.Store {
		return &model{fault: os.Getenv(faultVar), rows: map[dedup.Key]*row{}}
	}, storetest.Caps{
		Lapse: func(_ *testing.T, s dedup.Store, k dedup.Key) {
			edit(s, k, func(r *row) { r.leaseEnd = time.Now() })
		},
		Expire: func(_ *testing.T, s dedup.Store, k dedup.Key) {
			edit(s, k, func(r *row) { r.leaseEnd, r.ExpiresAt = time.Now(), time.Now() })
		},
	})
}

// A suite is worth what it catches.
func TestFaultsAreCaught(t *testing.T) {
	for fault, by := range map[string]string{
		"claims race":                    "ConcurrentClaims",
		"repeated claim is a duplicate":  "ClaimRepeated",
		"completed is won by its token":  "ClaimRepeated",
		"mismatch only when completed":   "ClaimMismatch",
		"takeover keeps the token":       "ClaimAbandoned",
		"attempts not counted":           "ClaimAbandoned",
		"Renew without a token":          "WrongTokenWritesNothing",
		"Complete without a token":       "WrongTokenWritesNothing",
		"Release without a token":        "WrongTokenWritesNothing",
		"Renew ignores zero":             "RenewEndsTheLease",
		"Complete only within the lease": "CompleteAfterLease",
		"Complete only once":             "CompleteRepeated",
		"Complete overwrites":            "CompleteRepeated",
		"Release of finished rows":       "Release",
		"Resolve of live rows":           "ResolveRefuses",
		"Resolve keeps the token":        "ResolveWithResponse",
		"expired rows are found":         "ExpiredIsAbsent",
		"Purge of live rows":             "PurgeKeepsLiveAndUnknown",
		"Purge of unknown rows":          "UnknownNeverExpires",
		"Purge without a limit":          "Purge",
		"keys fold case":                 "KeysApart",
		"keys lose trailing spaces":      "KeysApart",
		"keys joined by a colon":         "KeysApart",
		"keys cut to 254 bytes":          "KeysApart",
		"scope ignored":                  "ScopesApart",
		"answers shared":                 "AnswerIsCopied",
		"answers as text":                "AnswerBytes",
		"answers cut at NUL":             "AnswerBytes",
		"context ignored":                "CancelledContext",
	} {
		t.Run(fault, func(t *testing.T) {
			t.Parallel()
			cmd := exec.Command(os.Args[0], "-test.run=^TestModel$/^Store$/^"+by+"$")
			cmd.Env = append(os.Environ(), faultVar+"="+fault)
			out, err := cmd.CombinedOutput()
			if err == nil || !strings.Contains(string(out), "--- FAIL: TestModel/Store/"+by) {
				t.Errorf("%s does not catch it: %v\n%s", by, err, out)
			}
			if strings.Contains(string(out), "panic:") {
				t.Errorf("the suite panics:\n%s", out)
			}
		})
	}
}
