package main

import (
	"encoding/json"
	"net/http"

	"github.com/go-chi/chi/v5"

	"github.com/effectonce/idempotency/server"
)

// chiRoutes shows chi, which takes the guard as it is. Put it on routes by With,
// where chi knows the route's pattern already; by Use, before routing, each path
// would be an operation of its own.
func chiRoutes(guard *server.Guard, b *bank) http.Handler {
	r := chi.NewRouter()
	r.Route("/accounts/{id}", func(r chi.Router) {
		r.With(guard.Handler).Post("/charges", func(w http.ResponseWriter, r *http.Request) {
			var o order
			if err := json.NewDecoder(r.Body).Decode(&o); err != nil {
				http.Error(w, "malformed order", http.StatusBadRequest)
				return
			}
			if o.Amount <= 0 {
				http.Error(w, "nothing to charge", http.StatusUnprocessableEntity)
				return
			}
			account := chi.URLParam(r, "id")
			w.Header().Set("Content-Type", "application/json")
			w.WriteHeader(http.StatusCreated)
			_ = json.NewEncoder(w).Encode(receipt{account, b.charge(account), o.Amount})
		})
	})
	return r
}
