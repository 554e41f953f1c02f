package main

import (
	"net/http"

	"github.com/labstack/echo/v4"

	"github.com/effectonce/idempotency/server"
)

func echoRoutes(guard *server.Guard, b *bank) http.Handler {
	e := echo.New()
	e.POST("/accounts/:id/charges", func(c echo.Context) error {
		var o order
		if err := c.Bind(&o); err != nil {
			return echo.NewHTTPError(http.StatusBadRequest, "malformed order")
		}
		if o.Amount <= 0 {
			return echo.NewHTTPError(http.StatusUnprocessableEntity, "nothing to charge")
		}
		account := c.Param("id")
		return c.JSON(http.StatusCreated, receipt{account, b.charge(account), o.Amount})
	}, echoGuard(guard))
	// A plain http.Handler needs no more than echo's own wrapper.
	e.POST("/ping", echo.WrapHandler(guard.Handler(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		_, _ = w.Write([]byte("pong"))
	}))))
	return e
}

// echoGuard guards handlers of echo. Unlike echo.WrapMiddleware it has a
// handler's error answered behind the guard: echo would do so only after the
// guard has stored an empty 200.
func echoGuard(guard *server.Guard) echo.MiddlewareFunc {
	return func(next echo.HandlerFunc) echo.HandlerFunc {
		return func(c echo.Context) error {
			outer, request := c.Response(), c.Request()
			defer func() {
				c.SetResponse(outer)
				c.SetRequest(request)
			}()
			guarded := guard.Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				c.SetRequest(r)
				c.SetResponse(echo.NewResponse(w, c.Echo()))
				if err := next(c); err != nil {
					c.Error(err)
				}
			}))
			r := request.WithContext(request.Context())
			r.Pattern = c.Path() // the guard makes the operation of it
			guarded.ServeHTTP(outer, r)
			return nil
		}
	}
}
