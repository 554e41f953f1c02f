// Package rabbitbroker connects RabbitMQ (AMQP 0-9-1) with packages consumer and
// outbox.
//
// A [Handler] serves the deliveries of amqp.Channel.Consume: it handles each
// message once and then acknowledges it, or requeues it, or gives it to the dead
// letters.
package rabbitbroker
