"""Server-rendered pages (a later release); the HTTP faces never know a concrete adapter."""
