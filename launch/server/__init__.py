"""The pipeline behind a WebSocket: ``/v1/realtime``, its health, its metrics, and the page that speaks to it."""
