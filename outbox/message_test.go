package outbox_test

import (
	"context"
	"database/sql"
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/effectonce/idempotency/outbox"
)

// recorder is a transaction that keeps the statements.
type recorder struct {
	queries []string
	args    [][]any
}

func (r *recorder) ExecContext(_ context.Context, q string, args ...any) (sql.Result, error) {
	r.queries, r.args = append(r.queries, q), append(r.args, args)
	return nil, nil
}

func TestEnqueueIsOneStatement(t *testing.T) {
	t.Parallel()
	for _, d := range []outbox.Dialect{outbox.Postgres, outbox.MySQL, outbox.SQLite} {
		r := &recorder{}
		box := &outbox.Outbox{Dialect: d}
		if err := box.Enqueue(t.Context(), r, make3()...); err != nil {
			t.Fatal(err)
		}
		if len(r.queries) != 1 || len(r.args[0]) != 15 {
			t.Errorf("%d statements with %d arguments", len(r.queries), len(r.args[0]))
		}
		if err := box.Enqueue(t.Context(), r); err != nil || len(r.queries) != 1 {
			t.Errorf("for no messages: %d statements, %v", len(r.queries), err)
		}
	}
}

func make3() []outbox.Message {
	return []outbox.Message{{Topic: "a"}, {Topic: "b"}, {Topic: "c"}}
}

func TestInject(t *testing.T) {
	t.Parallel()
	r := &recorder{}
	box := &outbox.Outbox{Inject: func(_ context.Context, h map[string]string) { h["traceparent"] = "00-1" }}
	mine := map[string]string{"a": "b"}
	if err := box.Enqueue(t.Context(), r, outbox.Message{Topic: "t", Header: mine}); err != nil {
		t.Fatal(err)
	}
	if got := string(r.args[0][3].([]byte)); got != `{"a":"b","traceparent":"00-1"}` {
		t.Errorf("header %s", got)
	}
	if len(mine) != 1 {
		t.Error("the caller's map was changed")
	}
}

func TestEnqueueRefuses(t *testing.T) {
	t.Parallel()
	long := strings.Repeat("x", 256)
	for name, m := range map[string]outbox.Message{
		"no topic":   {},
		"long topic": {Topic: long},
		"long key":   {Topic: "t", Key: long},
		"long id":    {Topic: "t", ID: long},
		"NUL":        {Topic: "t\x00"},
		"not UTF-8":  {Topic: "t", Key: "\xff"},
		"header":     {Topic: "t", Header: map[string]string{"": "a"}},
		"value":      {Topic: "t", Header: map[string]string{"a": "\xff"}},
	} {
		r := &recorder{}
		err := (&outbox.Outbox{}).Enqueue(t.Context(), r, outbox.Message{Topic: "good"}, m)
		if !errors.Is(err, outbox.ErrMessage) || len(r.queries) != 0 {
			t.Errorf("%s: %v, %d statements", name, err, len(r.queries))
		}
	}
	for name, box := range map[string]*outbox.Outbox{
		"nil": nil, "dialect": {Dialect: 9}, "table": {Table: "a b"}, "digit": {Table: "1a"}, "dots": {Table: "a.b.c"}, "SQLite schema": {Dialect: outbox.SQLite, Table: "a.b"}, "retention": {Retention: -1},
	} {
		if err := box.Enqueue(t.Context(), &recorder{}, outbox.Message{Topic: "t"}); !errors.Is(err, outbox.ErrConfig) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if err := (&outbox.Outbox{}).InTx(t.Context(), nil); !errors.Is(err, outbox.ErrConfig) {
		t.Errorf("without a DB: %v", err)
	}
}

func TestNewID(t *testing.T) {
	t.Parallel()
	var ids []string
	for range 3 {
		ids = append(ids, outbox.NewID())
		time.Sleep(2 * time.Millisecond) // the order is by the millisecond
	}
	if !slices.IsSorted(ids) || len(ids[0]) != 36 || ids[0][14] != '7' || !strings.ContainsRune("89ab", rune(ids[0][19])) {
		t.Errorf("%q", ids)
	}
}
