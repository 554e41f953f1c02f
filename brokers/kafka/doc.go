// Package kafkabroker connects Kafka, over franz-go, with packages consumer and
// outbox.
//
// A [Handler] consumes the topics of a consumer group: it handles each record
// once, in the order of its partition, and commits a record's offset only when
// it and all before it are done or with the dead letters.
package kafkabroker
