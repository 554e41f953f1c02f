package client_test

import (
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// A module that imports the root package alone gets no driver, broker or
// server into its build list, and keeps its go directive.
func TestRootPackageBringsNoDriver(t *testing.T) {
	t.Parallel()
	root, err := filepath.Abs("../..")
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	const directive = "1.26.0"
	files := map[string]string{
		"go.mod": "module example.com/sdk\n\ngo " + directive + "\n\n" +
			"require github.com/effectonce/idempotency v0.0.0\n\n" +
			"replace github.com/effectonce/idempotency => " + root + "\n",
		"sdk.go": "package sdk\n\n" +
			"import (\n\t\"net/http\"\n\n\t\"github.com/effectonce/idempotency\"\n)\n\n" +
			"func New() *http.Client { return &http.Client{Transport: &idempotency.Transport{}} }\n",
	}
	for name, content := range files {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	run := func(args ...string) string {
		t.Helper()
		cmd := exec.CommandContext(t.Context(), "go", args...)
		cmd.Dir = dir
		cmd.Env = append(os.Environ(), "GOWORK=off", "GOFLAGS=-mod=mod")
		var stderr strings.Builder
		cmd.Stderr = &stderr
		out, err := cmd.Output()
		if err != nil {
			t.Fatalf("go %s: %v\n%s", strings.Join(args, " "), err, stderr.String())
		}
		return string(out)
	}
	run("build", "./...")

	allowed := []string{
		"example.com/sdk", "github.com/effectonce/idempotency",
		"github.com/hashicorp/go-retryablehttp", "github.com/hashicorp/go-cleanhttp", "github.com/hashicorp/go-hclog",
		"github.com/google/uuid", "github.com/cenkalti/backoff/v4", "github.com/dunglas/httpsfv",
	}
	// What is linked is little; what only versions are counted for may be more,
	// but no driver.
	for _, m := range strings.Fields(run("list", "-deps", "-f", "{{with .Module}}{{.Path}}{{end}}", "./...")) {
		if !slices.Contains(allowed, m) {
			t.Errorf("the build has %s", m)
		}
	}
	for _, m := range strings.Fields(run("list", "-m", "-f", "{{.Path}}", "all")) {
		for _, word := range []string{
			"idempotency/", "pgx", "lib/pq", "mysql", "sqlite", "redis", "nats", "kafka", "franz-go", "amqp", "watermill", "rabbit", "testcontainers",
		} {
			if strings.Contains(m, word) {
				t.Errorf("go list -m all has %s", m)
			}
		}
	}

	var mod struct{ Go, Toolchain string }
	if err := json.Unmarshal([]byte(run("mod", "edit", "-json")), &mod); err != nil {
		t.Fatal(err)
	}
	// Building rewrites the directive where a dependency asks for more.
	if mod.Go != directive || mod.Toolchain != "" {
		t.Errorf("the go directive became %s, the toolchain %q", mod.Go, mod.Toolchain)
	}
}
