// Package natsbroker connects NATS JetStream with packages consumer and outbox.
//
// A [Handler] is what jetstream.Consumer.Consume takes: it handles each message
// once and then acknowledges it, or has it delivered again, or gives it to the
// dead letters.
package natsbroker
