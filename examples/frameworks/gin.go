package main

import (
	"net/http"

	"github.com/gin-gonic/gin"

	"github.com/effectonce/idempotency/server"
)

func ginRoutes(guard *server.Guard, b *bank) http.Handler {
	r := gin.New()
	r.POST("/accounts/:id/charges", ginGuard(guard, func(c *gin.Context) {
		var o order
		if err := c.ShouldBindJSON(&o); err != nil {
			c.String(http.StatusBadRequest, "malformed order")
			return
		}
		if o.Amount <= 0 {
			c.String(http.StatusUnprocessableEntity, "nothing to charge")
			return
		}
		account := c.Param("id")
		c.JSON(http.StatusCreated, receipt{account, b.charge(account), o.Amount})
	}))
	// A plain http.Handler needs no more than gin's own wrapper.
	r.POST("/ping", gin.WrapH(guard.Handler(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		_, _ = w.Write([]byte("pong"))
	}))))
	return r
}

// ginGuard guards a handler of gin. It wraps the handler instead of calling
// c.Next like a middleware, since a transaction that lost a race runs it again,
// and c.Next runs what follows only once.
func ginGuard(guard *server.Guard, h gin.HandlerFunc) gin.HandlerFunc {
	return func(c *gin.Context) {
		outer, request := c.Writer, c.Request
		defer func() { c.Writer, c.Request = outer, request }()
		guarded := guard.Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			c.Request = r
			c.Writer = &ginWriter{ResponseWriter: outer, w: w, status: http.StatusOK, size: -1}
			h(c)
			c.Writer.WriteHeaderNow()
		}))
		r := request.WithContext(request.Context())
		r.Pattern = c.FullPath() // the guard makes the operation of it
		guarded.ServeHTTP(outer, r)
	}
}

// ginWriter is gin's view of the guard's http.ResponseWriter. Gin keeps the
// status to itself until something is written.
type ginWriter struct {
	gin.ResponseWriter // for what a guarded handler has no use for
	w                  http.ResponseWriter
	status, size       int
}

func (g *ginWriter) Unwrap() http.ResponseWriter { return g.w }
func (g *ginWriter) Header() http.Header         { return g.w.Header() }
func (g *ginWriter) Status() int                 { return g.status }
func (g *ginWriter) Size() int                   { return g.size }
func (g *ginWriter) Written() bool               { return g.size >= 0 }

func (g *ginWriter) WriteHeader(status int) {
	if status > 0 && !g.Written() {
		g.status = status
	}
}

func (g *ginWriter) WriteHeaderNow() {
	if !g.Written() {
		g.size = 0
		g.w.WriteHeader(g.status)
	}
}

func (g *ginWriter) Write(p []byte) (int, error) {
	g.WriteHeaderNow()
	n, err := g.w.Write(p)
	g.size += n
	return n, err
}

func (g *ginWriter) WriteString(s string) (int, error) { return g.Write([]byte(s)) }

func (g *ginWriter) Flush() {
	g.WriteHeaderNow()
	_ = http.NewResponseController(g.w).Flush()
}
