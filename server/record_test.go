package server_test

import (
	"bytes"
	"errors"
	"net/http"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/effectonce/idempotency/server"
)

var compareRecords = cmp.Options{cmp.AllowUnexported(server.Record{}, server.Change{}), cmpopts.EquateEmpty()}

func TestRecord(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name string
		rec  server.Record
	}{
		{"nothing", server.NewRecord(false, nil, nil)},
		{"tombstone", server.NewRecord(true, []server.Change{server.NewChange("Etag", false, `"1"`)}, nil)},
		{"all", server.NewRecord(false,
			[]server.Change{
				server.NewChange("Content-Type", false, "application/json"),
				server.NewChange("Link", false, "<a>; rel=x, <b>", "<c>", ""),
				server.NewChange("Server", false),
				server.NewChange("Vary", true, "Accept"),
				server.NewChange("x-lower", false, "1\x00\xff"),
			},
			[]server.Change{server.NewChange("Checksum", false, "1"), server.NewChange(http.TrailerPrefix+"Y", false, "2")})},
		{"large", server.NewRecord(false, []server.Change{server.NewChange("X", false, string(make([]byte, 70000)))}, nil)},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			b := tt.rec.Encode()
			got, err := server.DecodeRecord(b)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(tt.rec, got, compareRecords); diff != "" {
				t.Error(diff)
			}
			// Every shorter piece of it, and more than it, is refused.
			for i := range b[:min(len(b), 500)] {
				if _, err := server.DecodeRecord(b[:i]); !errors.Is(err, server.ErrRecord) {
					t.Fatalf("the first %d of %d bytes: error %v", i, len(b), err)
				}
			}
			if _, err := server.DecodeRecord(append(b[:len(b):len(b)], 0)); !errors.Is(err, server.ErrRecord) {
				t.Errorf("one byte more: error %v", err)
			}
		})
	}
}

// Rows outlive a deploy: what is written today must be readable tomorrow.
func TestRecordFormatIsStable(t *testing.T) {
	t.Parallel()
	want := "\x01\x01" + "\x02" + "\x00\x04Etag\x01\x03\"1\"" + "\x01\x04Vary\x01\x06Accept" + "\x01" + "\x00\x01T\x01\x01x"
	rec := server.NewRecord(true,
		[]server.Change{server.NewChange("Etag", false, `"1"`), server.NewChange("Vary", true, "Accept")},
		[]server.Change{server.NewChange("T", false, "x")})
	if got := string(rec.Encode()); got != want {
		t.Errorf("encoded\n got %q\nwant %q", got, want)
	}
}

func TestRecordRefuses(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct{ name, src string }{
		{"other version", "\x02\x00\x00\x00"},
		{"unknown flag", "\x01\x02\x00\x00"},
		{"names out of order", "\x01\x00\x02\x00\x01B\x00\x00\x01A\x00\x00"},
		{"name twice", "\x01\x00\x02\x00\x01A\x00\x00\x01A\x00\x00"},
		{"empty name", "\x01\x00\x01\x00\x00\x00\x00"},
		{"unknown operation", "\x01\x00\x01\x02\x01A\x00\x00"},
		{"number not in its shortest form", "\x01\x00\x80\x00\x00"},
		{"huge count", "\x01\x00\xff\xff\xff\xff\xff\xff\xff\xff\x7f\x00"},
		{"endless number", "\x01\x00\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01"},
		{"length past the end", "\x01\x00\x01\x00\x09A\x00\x00"},
	} {
		if got, err := server.DecodeRecord([]byte(tt.src)); !errors.Is(err, server.ErrRecord) {
			t.Errorf("%s: decoded to %+v, %v", tt.name, got, err)
		}
	}
}

func FuzzRecord(f *testing.F) {
	f.Add([]byte("\x01\x00\x00\x00"))
	f.Add(server.NewRecord(true, []server.Change{server.NewChange("A", true, "1", ""), server.NewChange("B", false)},
		[]server.Change{server.NewChange("T", false, "x")}).Encode())
	f.Fuzz(func(t *testing.T, b []byte) {
		rec, err := server.DecodeRecord(b)
		if err != nil {
			if !errors.Is(err, server.ErrRecord) {
				t.Fatal(err)
			}
			return
		}
		if again := rec.Encode(); !bytes.Equal(again, b) {
			t.Fatalf("%q decodes, but encodes to %q", b, again)
		}
	})
}

func TestHeaderChanges(t *testing.T) {
	t.Parallel()
	entry := http.Header{"Vary": {"Origin"}, "X-Request-Id": {"1"}, "Server": {"outer"}, "Cache-Control": {"no-store"}, "Nil": nil}
	now := entry.Clone()
	now.Add("Vary", "Accept")
	now.Add("Vary", "Cookie")
	now.Set("Cache-Control", "private")
	now.Del("Server")
	now.Add("Link", "<a>")
	now.Add("Link", "<b>, <c>")
	now["Date"] = nil
	now["Nil"] = []string{"x"}
	now[""] = []string{"x"}
	now[http.TrailerPrefix+"T"] = []string{"late"}

	got := server.Diff(entry, now)
	want := []server.Change{
		server.NewChange("Cache-Control", false, "private"),
		server.NewChange("Date", false),
		server.NewChange("Link", false, "<a>", "<b>, <c>"),
		server.NewChange("Nil", false, "x"),
		server.NewChange("Server", false),
		server.NewChange("Vary", true, "Accept", "Cookie"),
	}
	if diff := cmp.Diff(want, got, compareRecords); diff != "" {
		t.Error(diff)
	}
	now["Link"][0] = "changed later"
	if _, _, values := got[2].Fields(); values[0] != "<a>" {
		t.Error("a later change to the header shows in the record")
	}

	// Another request comes with other headers from outside.
	replay := http.Header{"Vary": {"Other"}, "X-Request-Id": {"2"}, "Server": {"outer"}}
	for _, c := range got {
		c.Apply(replay)
	}
	wantReplay := http.Header{"Vary": {"Other", "Accept", "Cookie"}, "X-Request-Id": {"2"}, "Server": nil,
		"Cache-Control": {"private"}, "Date": nil, "Link": {"<a>", "<b>, <c>"}, "Nil": {"x"}}
	if diff := cmp.Diff(wantReplay, replay, cmpopts.EquateEmpty()); diff != "" {
		t.Error(diff)
	}
}
