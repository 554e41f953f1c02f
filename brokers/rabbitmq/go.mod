module github.com/effectonce/idempotency/brokers/rabbitmq

go 1.26.0

require github.com/effectonce/idempotency v0.0.0

require github.com/rabbitmq/amqp091-go v1.16.0

replace github.com/effectonce/idempotency => ../..
