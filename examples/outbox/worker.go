package main

import (
	"context"
	"database/sql"
	"fmt"
	"strings"
	"time"

	_ "github.com/jackc/pgx/v5/stdlib"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	natsbroker "github.com/effectonce/idempotency/brokers/nats"
	"github.com/effectonce/idempotency/consumer"
	sqlitedb "github.com/effectonce/idempotency/drivers/sqlite"
	"github.com/effectonce/idempotency/outbox"
)

// shop is the database: orders and their events, shipments and their marks.
type shop struct {
	settings
	db    *sql.DB
	box   *outbox.Outbox
	inbox *consumer.Inbox
}

func open(_ context.Context, s settings) (*shop, error) {
	sh := &shop{settings: s,
		box:   &outbox.Outbox{Dialect: outbox.SQLite, Table: "shop_outbox"},
		inbox: &consumer.Inbox{Group: "shipping", Dialect: consumer.SQLite, Table: "shop_inbox"}}
	var err error
	if strings.HasPrefix(s.db, "postgres") {
		sh.box.Dialect, sh.inbox.Dialect = outbox.Postgres, consumer.Postgres
		sh.db, err = sql.Open("pgx", s.db)
	} else {
		sh.db, err = sqlitedb.Open(s.db)
	}
	sh.box.DB, sh.inbox.DB = sh.db, sh.db
	return sh, err
}

func (s *shop) close() { s.db.Close() }

func (s *shop) migrate(ctx context.Context) error {
	if err := s.box.Migrate(ctx); err != nil {
		return err
	}
	if err := s.inbox.Migrate(ctx); err != nil {
		return err
	}
	// The stream tells one run from another on the same database.
	for _, q := range []string{
		`CREATE TABLE IF NOT EXISTS shop_orders (run TEXT NOT NULL, id INTEGER NOT NULL, PRIMARY KEY (run, id))`,
		`CREATE TABLE IF NOT EXISTS shop_shipments (run TEXT NOT NULL, id TEXT NOT NULL)`, // refuses nothing
	} {
		if _, err := s.db.ExecContext(ctx, q); err != nil {
			return err
		}
	}
	return nil
}

// done says whether all orders are taken and shipped.
func (s *shop) done(ctx context.Context) (bool, error) {
	var n, shipped int
	err := s.db.QueryRowContext(ctx, `SELECT (SELECT count(*) FROM shop_orders WHERE run = $1),
		(SELECT count(DISTINCT id) FROM shop_shipments WHERE run = $1)`, s.stream).Scan(&n, &shipped)
	return n >= s.orders && shipped >= s.orders, err
}

func (s *shop) count(ctx context.Context) (orders, shipped, doubled, lost int, err error) {
	err = s.db.QueryRowContext(ctx, `SELECT
		(SELECT count(*) FROM shop_orders WHERE run = $1),
		(SELECT count(*) FROM shop_shipments WHERE run = $1),
		(SELECT count(*) - count(DISTINCT id) FROM shop_shipments WHERE run = $1),
		(SELECT count(*) FROM shop_orders o WHERE run = $1 AND NOT EXISTS
			(SELECT 1 FROM shop_shipments s WHERE s.run = o.run AND s.id = CAST(o.id AS TEXT)))`, s.stream).
		Scan(&orders, &shipped, &doubled, &lost)
	return orders, shipped, doubled, lost, err
}

// work takes orders, relays their events and ships, all at the same time, until
// ctx ends or the process is killed.
func work(ctx context.Context, s settings) error {
	sh, err := open(ctx, s)
	if err != nil {
		return err
	}
	defer sh.close()
	nc, err := nats.Connect(s.nats)
	if err != nil {
		return err
	}
	defer nc.Close()
	js, err := jetstream.New(nc)
	if err != nil {
		return err
	}
	relay, err := outbox.New(sh.box, &natsbroker.Publisher{JetStream: js}, outbox.Options{Batch: 10, Lease: 100 * time.Millisecond, Poll: 10 * time.Millisecond})
	if err != nil {
		return err
	}
	stop, err := sh.ship(ctx, js)
	if err != nil {
		return err
	}
	defer stop()
	failed := make(chan error, 2)
	go func() { failed <- relay.Run(ctx) }()
	go func() {
		if err := sh.takeOrders(ctx); err != nil {
			failed <- err
		}
	}()
	return <-failed
}

// takeOrders goes on after the last order that was committed.
func (s *shop) takeOrders(ctx context.Context) error {
	var last int
	if err := s.db.QueryRowContext(ctx, `SELECT COALESCE(MAX(id), 0) FROM shop_orders WHERE run = $1`, s.stream).Scan(&last); err != nil {
		return err
	}
	for id := last + 1; id <= s.orders; id++ {
		err := s.box.InTx(ctx, func(ctx context.Context, tx *sql.Tx) error {
			if _, err := tx.ExecContext(ctx, `INSERT INTO shop_orders (run, id) VALUES ($1, $2)`, s.stream, id); err != nil {
				return err
			}
			return s.box.Enqueue(ctx, tx, outbox.Message{Topic: s.stream, Key: fmt.Sprint("customer ", id%7), Payload: fmt.Append(nil, id)})
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// ship handles each event once: the shipment and the mark are one transaction.
func (s *shop) ship(ctx context.Context, js jetstream.JetStream) (stop func(), err error) {
	c, err := js.CreateOrUpdateConsumer(ctx, s.stream, jetstream.ConsumerConfig{Durable: "shipping", AckPolicy: jetstream.AckExplicitPolicy, AckWait: 200 * time.Millisecond})
	if err != nil {
		return nil, err
	}
	h := natsbroker.Handler{Consumer: s.inbox, Handle: func(ctx context.Context, msg jetstream.Msg) error {
		_, err := consumer.Tx(ctx).ExecContext(ctx, `INSERT INTO shop_shipments (run, id) VALUES ($1, $2)`, s.stream, string(msg.Data()))
		return err
	}}
	deliver, err := h.Func(ctx)
	if err != nil {
		return nil, err
	}
	cc, err := c.Consume(deliver)
	if err != nil {
		return nil, err
	}
	return cc.Stop, nil
}
