package main

import (
	"context"
	"errors"
	"net/http"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/types/known/structpb"

	"github.com/effectonce/idempotency/server"
)

const (
	chargeService   = "/pay.v1.ChargeService/"
	chargeProcedure = chargeService + "Charge"
)

// connectRoutes shows Connect, whose handlers are http.Handlers. Guard unary
// procedures only, and with Connect's own protocol or gRPC-Web clients in mind
// if you use transactions: gRPC answers an error with status 200 and a trailer,
// which would be committed; let the procedure call dedup.Rollback then.
//
// (The message is a Struct, so that the example needs no generated code.)
func connectRoutes(guard *server.Guard, b *bank) http.Handler {
	charge := connect.NewUnaryHandler(chargeProcedure,
		func(_ context.Context, r *connect.Request[structpb.Struct]) (*connect.Response[structpb.Struct], error) {
			account := r.Msg.GetFields()["account"].GetStringValue()
			amount := r.Msg.GetFields()["amount"].GetNumberValue()
			if amount <= 0 {
				return nil, connect.NewError(connect.CodeInvalidArgument, errors.New("nothing to charge"))
			}
			msg, err := structpb.NewStruct(map[string]any{
				"account": account, "number": b.charge(account), "amount": amount,
			})
			if err != nil {
				return nil, err
			}
			return connect.NewResponse(msg), nil
		})
	// Clients of Connect understand its errors, not problem documents.
	errorWriter := connect.NewErrorWriter()
	guard = guard.With(func(o *server.Options) {
		o.ErrorHandler = func(w http.ResponseWriter, r *http.Request, p *server.Problem) {
			if !errorWriter.IsSupported(r) {
				server.WriteProblem(w, r, p)
				return
			}
			_ = errorWriter.Write(w, r, connect.NewError(connectCode(p), errors.New(p.Type)))
		}
	})
	mux := http.NewServeMux()
	mux.Handle(chargeProcedure, guard.Handler(charge))
	return mux
}

// connectCode is the code for a problem. A client must be able to tell "again
// later" from "never".
func connectCode(p *server.Problem) connect.Code {
	switch p.Type {
	case server.TypeInProgress:
		return connect.CodeAborted
	case server.TypeUnavailable, server.TypeOutcomePending:
		return connect.CodeUnavailable
	case server.TypeKeyReused:
		return connect.CodeFailedPrecondition
	case server.TypeKeyMissing, server.TypeKeyInvalid, server.TypeBodyUnreadable:
		return connect.CodeInvalidArgument
	case server.TypeBodyTooLarge:
		return connect.CodeResourceExhausted
	case server.TypeResponseGone:
		return connect.CodeAlreadyExists
	}
	if p.Status == http.StatusUnauthorized {
		return connect.CodeUnauthenticated
	}
	return connect.CodeInternal
}
