// Frameworks guards one endpoint, POST /accounts/{id}/charges, written for chi,
// gin, echo and Connect, each in the way that is natural to it. Run it to see a
// request and its repetition through each of them:
//
//	go run ./examples/frameworks
package main

import (
	"fmt"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"sync"
	"text/tabwriter"

	"github.com/gin-gonic/gin"

	"github.com/effectonce/idempotency/dedup"
	"github.com/effectonce/idempotency/dedup/memstore"
	"github.com/effectonce/idempotency/server"
)

// bank is what the endpoints act on.
type bank struct {
	mu      sync.Mutex
	charges map[string]int // how many, by account
}

// charge does the effect, and returns the charge's number.
func (b *bank) charge(account string) int {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.charges == nil {
		b.charges = make(map[string]int)
	}
	b.charges[account]++
	return b.charges[account]
}

func (b *bank) count(account string) int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.charges[account]
}

// order is the body of a request, receipt that of its answer.
type order struct {
	Amount int `json:"amount"`
}

type receipt struct {
	Account string `json:"account"`
	Number  int    `json:"number"`
	Amount  int    `json:"amount"`
}

// tenant is whose keys a request's key is among. A real service takes it from
// what authentication found.
func tenant(r *http.Request) (string, error) {
	if t := r.Header.Get("X-Tenant"); t != "" {
		return t, nil
	}
	return "", &server.Problem{Type: "about:blank", Status: http.StatusUnauthorized, Title: "Unauthorized"}
}

// frameworks are the endpoint's versions. target is where the endpoint for the
// account 42 is.
var frameworks = []struct {
	name   string
	target string
	routes func(guard *server.Guard, b *bank) http.Handler
}{
	{"chi", "/accounts/42/charges", chiRoutes},
	{"gin", "/accounts/42/charges", ginRoutes},
	{"echo", "/accounts/42/charges", echoRoutes},
	{"connect", chargeProcedure, connectRoutes},
}

// body is a request for the account 42. Connect has the account in it, since
// its paths have no parameters.
const body = `{"account":"42","amount":1999}`

func newGuard(store dedup.Store) *server.Guard {
	return server.New(store, server.Options{Scope: tenant, Required: true})
}

func main() {
	log.SetFlags(0)
	gin.SetMode(gin.ReleaseMode) // otherwise it prints its routes
	out := tabwriter.NewWriter(os.Stdout, 0, 0, 2, ' ', 0)
	fmt.Fprintln(out, "FRAMEWORK\tREQUEST\tSTATUS\tREPLAYED\tBODY\tCHARGES")
	for _, f := range frameworks {
		var b bank
		srv := httptest.NewServer(f.routes(newGuard(memstore.New()), &b))
		for _, name := range []string{"first", "repeated"} {
			status, header, answer, err := send(srv.URL + f.target)
			if err != nil {
				log.Fatal(err)
			}
			fmt.Fprintf(out, "%s\t%s\t%d\t%t\t%s\t%d\n", f.name, name, status,
				header.Get("Idempotent-Replayed") == "true", strings.TrimSpace(answer), b.count("42"))
		}
		srv.Close()
	}
	if err := out.Flush(); err != nil {
		log.Fatal(err)
	}
}

func send(url string) (int, http.Header, string, error) {
	r, err := http.NewRequest(http.MethodPost, url, strings.NewReader(body))
	if err != nil {
		return 0, nil, "", err
	}
	r.Header.Set("Content-Type", "application/json")
	r.Header.Set("Idempotency-Key", "charge-1")
	r.Header.Set("X-Tenant", "acme")
	res, err := http.DefaultClient.Do(r)
	if err != nil {
		return 0, nil, "", err
	}
	defer res.Body.Close()
	answer, err := io.ReadAll(res.Body)
	return res.StatusCode, res.Header, string(answer), err
}
