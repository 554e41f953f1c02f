package redisstore_test

import (
	"context"
	"log"

	"github.com/redis/go-redis/v9"

	"github.com/effectonce/idempotency/dedup"
	redisstore "github.com/effectonce/idempotency/drivers/redis"
)

func ExampleNew() {
	ctx := context.Background()
	client := redis.NewClient(&redis.Options{Addr: "localhost:6379"})
	defer client.Close()
	store, err := redisstore.New(ctx, client, redisstore.Options{
		Replicas: 1, // no claim and no answer counts before a replica has it
	})
	if err != nil {
		log.Fatal(err)
	}
	defer store.Close()
	_ = &dedup.Engine{Store: store}
}
