module github.com/effectonce/idempotency/server_test

go 1.26.0

require (
	github.com/effectonce/idempotency v0.0.0
	github.com/jackc/pgx/v5 v5.13.0
)

require (
	github.com/cespare/xxhash/v2 v2.3.0 // indirect
	github.com/google/go-cmp v0.7.0 // indirect
	github.com/redis/go-redis/v9 v9.23.0 // indirect
	go.uber.org/atomic v1.12.0 // indirect
)

require (
	github.com/andybalholm/brotli v1.1.0 // indirect
	github.com/effectonce/idempotency/drivers/pgx v0.0.0
	github.com/effectonce/idempotency/drivers/redis v0.0.0
	github.com/effectonce/idempotency/drivers/sqlite v0.0.0
	github.com/gofiber/fiber/v2 v2.52.15 // indirect
	github.com/google/uuid v1.6.0 // indirect
	github.com/jackc/pgpassfile v1.0.0 // indirect
	github.com/jackc/pgservicefile v0.0.0-20240606120523-5a60cdf6a761 // indirect
	github.com/jackc/puddle/v2 v2.2.3 // indirect
	github.com/klauspost/compress v1.17.9 // indirect
	github.com/mattn/go-colorable v0.1.13 // indirect
	github.com/mattn/go-isatty v0.0.24 // indirect
	github.com/mattn/go-runewidth v0.0.16 // indirect
	github.com/rivo/uniseg v0.2.0 // indirect
	github.com/valyala/bytebufferpool v1.0.0 // indirect
	github.com/valyala/fasthttp v1.51.0 // indirect
	github.com/valyala/tcplisten v1.0.0 // indirect
	golang.org/x/sync v0.22.0 // indirect
	golang.org/x/sys v0.49.0 // indirect
	golang.org/x/text v0.41.0 // indirect
)

replace github.com/effectonce/idempotency => ../

replace github.com/effectonce/idempotency/drivers/pgx => ../drivers/pgx

replace github.com/effectonce/idempotency/drivers/redis => ../drivers/redis

replace github.com/effectonce/idempotency/drivers/sqlite => ../drivers/sqlite
