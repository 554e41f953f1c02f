module github.com/effectonce/idempotency/examples

go 1.26.0

require github.com/effectonce/idempotency v0.0.0

replace github.com/effectonce/idempotency => ../
